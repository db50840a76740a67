/* Factors that are made of factors: columns times a scale, and products with a small matrix, in float64 whatever the types.
 *
 *     scaled  = scale·column, rounded to float64
 *     product = 0; for k = 0, 1, ...: product = fma(left[k], right[k], product)      in float64
 *
 * and then rounded once to the type that is stored: to nearest, ties to even.
 */
/* Rows and columns of a tile of float64 of the level; 0 where this processor does not have it. */
EXPORT int lora_tool_wide_columns(int level) { return words_of(level) ? words_of(level)->wide_columns : 0; }

static inline size_t wide_size_of(int type) { return type == F64 ? 8 : size_of(type); }

static inline int is_wide_type(int type) { return type >= 0 && type <= F64; }

static inline int is_too_large(uint32_t largest, int type) { return largest >= (type == F64 ? UINT32_MAX : too_large[type]); }

/* Write columns of a factor, every `step`-th of a row of `stride`, times `scale`, each product rounded to float64 and
 * then once to `out_type`, to every `apart`-th column of rows of `wide`. Return as `lora_tool_merge`. */
EXPORT int lora_tool_scale(int level, const void *source, int source_type, int64_t stride, int64_t step, void *out,
                           int out_type, int64_t wide, int64_t apart, int64_t rows, int64_t columns, double scale) {
    const struct words *words = words_of(level);
    if (!words || !is_wide_type(source_type) || !is_wide_type(out_type)) {
        return -1;
    }
    if (stride == columns && wide == columns && step == 1 && apart == 1) { /* one long row */
        stride = wide = columns = rows * columns;
        rows = columns > 0;
    }
    mode_type before = ieee_mode();
    uint32_t largest = 0;
    for (int64_t row = 0; row < rows; row++) {
        const char *read = (const char *)source + (size_t)(row * stride) * wide_size_of(source_type);
        char *write = (char *)out + (size_t)(row * wide) * wide_size_of(out_type);
        for (int64_t at = 0; at < columns; at += STRIP) {
            _Alignas(64) double line[STRIP];
            const int64_t count = least_of(columns - at, STRIP);
            words->scaled[source_type](line, read + (size_t)(at * step) * wide_size_of(source_type), step, scale, count);
            char *place = write + (size_t)(at * apart) * wide_size_of(out_type);
            uint32_t size = words->rounded(line, place, out_type, apart, count);
            largest = size > largest ? size : largest;
        }
    }
    restore_mode(before);
    return is_too_large(largest, out_type);
}

/* Pack lanes of a factor behind the `first` ones of panels that are `apart` numbers apart; see `packed` in wide.h. */
static void pack_lanes(const struct words *words, double *panels, int64_t apart, int64_t first, const void *values, int type,
                       int64_t along, int64_t down, int64_t lanes, int64_t depth) {
    const int64_t panel = words->panel;
    const char *read = values;
    for (int64_t some; lanes > 0; lanes -= some, first += some, read += (size_t)(some * along) * wide_size_of(type)) {
        some = least_of(panel - first % panel, lanes);
        if (along == 1 && some == panel) { /* lines of memory to their end: often one of them at a time is in the cache */
            some = least_of(ABREAST, lanes) / panel * panel;
        }
        words->packed[type](panels + first / panel * apart + first % panel, apart, read, along, down, some, depth);
    }
}

/* As `lora_tool_pack`, in float64 and of any type, in panels as wide as this level's tiles are high, and as many as whole
 * tiles have; into the places `from` to `from + depth` of panels that are `whole` deep: parts of a factor are packed one
 * after the other. */
EXPORT int lora_tool_pack_wide(int level, double *packed, int64_t whole, int64_t from, const void *factor, int type,
                               int64_t length, int64_t depth, int64_t along, int64_t down) {
    const struct words *words = words_of(level);
    if (!words || !is_wide_type(type)) {
        return -1;
    }
    const int64_t panel = words->panel, apart = panel * whole, whole_panels = length / panel * panel;
    const int64_t end = (length + words->wide_columns - 1) / words->wide_columns * words->wide_columns;
    double *place = packed + from * panel;
    mode_type before = ieee_mode();
    for (int64_t at = whole_panels; at < end; at += panel) {
        memset(place + at * whole, 0, (size_t)(panel * depth) * sizeof *place);
    }
    pack_lanes(words, place, apart, 0, factor, type, along, down, length, depth);
    restore_mode(before);
    return 0;
}

/* Write the product of packed factors, `rows` by `columns` elements: each a chain in float64, rounded once to the type,
 * in rows that are `stride` elements apart. Return as `lora_tool_merge`. */
EXPORT int lora_tool_product_wide(int level, const double *left, const double *right, int64_t depth, void *out,
                                  int out_type, int64_t stride, int64_t rows, int64_t columns) {
    const struct words *words = words_of(level);
    if (!words || !is_wide_type(out_type)) {
        return -1;
    }
    const int64_t high = words->panel, wide = words->wide_columns;
    mode_type before = ieee_mode();
    uint32_t largest = 0;
    for (int64_t column = 0; column < columns; column += wide) {
        for (int64_t row = 0; row < rows; row += high) {
            _Alignas(64) double tile[WIDE_MOST] = {0};
            words->wide_product(tile, left + row * depth, right + column * depth, depth, high * depth);
            for (int64_t r = 0; r < least_of(rows - row, high); r++) {
                char *write = (char *)out + (size_t)((row + r) * stride + column) * wide_size_of(out_type);
                uint32_t size = words->rounded(tile + r * wide, write, out_type, 1, least_of(columns - column, wide));
                largest = size > largest ? size : largest;
            }
        }
    }
    restore_mode(before);
    return is_too_large(largest, out_type);
}
