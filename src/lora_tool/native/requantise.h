/* Numbers stored as codes of eight bits again: the scales of the base are kept, and raised where a number does not fit.
 * formats/quantised/requantising.py says when, and how; both give the same bits. */

/* Lower `low` to the least and raise `high` to the largest of the numbers that have one scale, [rows of scales, groups].
 * The scales themselves are not looked at. Return as `lora_tool_merge`. */
EXPORT int lora_tool_extremes(int level, const struct codes *codes, const float *numbers, int64_t rows, int64_t columns,
                              float *low, float *high) {
    const struct words *words = words_of(level);
    if (!words) {
        return -1;
    }
    for (int64_t row = 0, last; row < rows; row = last) {
        const int64_t band = (row + codes->above) / codes->tall;
        int64_t at = band * codes->apart;
        last = least_of(rows, (band + 1) * codes->tall - codes->above);
        if (codes->group == 1) {
            for (int64_t each = row; each < last; each++) {
                words->column_extremes(numbers + each * columns, columns, low + at, high + at);
            }
            continue;
        }
        for (int64_t column = 0; column < columns; column += codes->group, at++) {
            int64_t count = least_of(columns - column, codes->group);
            words->extremes(numbers + row * columns + column, columns, last - row, count, low + at, high + at);
        }
    }
    return 0;
}

/* Write numbers as codes to `out`, row after row. They are `divided` by the scales, or multiplied with them; int8 has no
 * code below `least`. Return as `lora_tool_merge`. */
EXPORT int lora_tool_quantise(int level, const struct codes *codes, uint8_t *out, const float *numbers, int64_t rows,
                              int64_t columns, int divided, float least) {
    const struct words *words = words_of(level);
    if (!words || codes->kind == HALVES) {
        return -1;
    }
    const int64_t most = codes->group == 1 ? STRIP : codes->group;
    mode_type before = ieee_mode();
    for (int64_t row = 0; row < rows; row++) {
        const float *scales = scales_at(codes, row);
        for (int64_t column = 0; column < columns; column += most) {
            int64_t count = least_of(columns - column, most), at = row * columns + column;
            float line[STRIP], scale = scales[column / codes->group];
            const float *from = numbers + at;
            if (codes->group == 1) { /* divided here, and then by 1 */
                words->ratios(line, from, scales + column, count, divided);
                from = line;
                scale = 1.0f;
            }
            if (codes->kind == E4M3) {
                words->e4m3_of(out + at, 0, from, 0, 1, count, scale);
            } else {
                words->int8_of(out + at, from, scale, count, divided, least);
            }
        }
    }
    restore_mode(before);
    return 0;
}

enum { POWERS = TYPES }; /* the type of scales that are powers of two, in eight bits; others are an `enum type` */

/* Where merged numbers are stored as codes again. `scratch` has room for `panel` numbers of each row that is computed
 * together: those of a row of tiles, or of a tile of the kernel where each row has scales of its own. */
struct storing {
    float *raised, *scratch;
    float *meant; /* where the numbers of the first rows go, too */
    int64_t kept; /* and how many rows that are */
    int64_t panel; /* columns that are computed together: whole tiles, and whole tiles of the kernel, or all columns */
    float least, most; /* of codes, as numbers */
    int32_t scale_type, divided;
};

/* A positive number in the type of scales: the nearest, of powers of two the next that is not smaller. */
static float as_scale(float needed, int type) {
    int exponent;
    switch (type) {
    case BF16:
        return from_bf16(to_bf16(needed));
    case F16:
        return from_f16(to_f16(needed));
    case F32:
        return needed;
    default:
        exponent = frexpf(needed, &exponent) > 0.5f ? exponent : exponent - 1;
        return ldexpf(1.0f, exponent < -127 ? -127 : exponent > 127 ? 127 : exponent);
    }
}

static float scale_that_fits(const struct storing *to, float room, float scale, float low, float high) {
    if (!(high > to->most * room || low < to->least * room)) {
        return scale;
    }
    const float up = to->divided ? high / to->most : high, down = to->divided ? low / to->least : -low;
    return as_scale(up > down ? up : down, to->scale_type);
}

/* Some columns of a row of tiles: its numbers, then its scales, then its codes. */
static void tiles_stored(const struct words *words, const struct codes *codes, const struct storing *to, uint8_t *out,
                         const struct area *area, int64_t stride) {
    const float *numbers = area->out;
    const int64_t group = codes->group, groups = (area->columns + group - 1) / group;
    const int64_t bands = codes->tall == 1 ? area->rows : 1, each = codes->tall == 1 ? 1 : area->rows;
    for (int64_t band = 0; band < bands; band++) {
        const int64_t at = (area->row / codes->tall + band) * codes->apart + area->column / group;
        for (int64_t g = 0; g < groups; g++) {
            const float *first = numbers + band * area->apart + g * group, scale = codes->scales[at + g];
            const int64_t count = least_of(area->columns - g * group, group);
            float low = INFINITY, high = -INFINITY;
            words->extremes(first, area->apart, each, count, &low, &high);
            const float found = scale_that_fits(to, fabsf(scale * codes->again), scale, low, high);
            const float factor = found == 0.0f ? 1.0f : found;
            to->raised[at + g] = found;
            uint8_t *write = out + (area->row + band) * stride + area->column + g * group;
            if (codes->kind == E4M3) {
                words->e4m3_of(write, stride, first, area->apart, each, count, factor);
                continue;
            }
            for (int64_t r = 0; r < each; r++) {
                words->int8_of(write + r * stride, first + r * area->apart, to->divided ? factor : to->most / factor, count,
                               to->divided, to->least);
            }
        }
    }
}

/* Whether rows of codes can be stored again from the first of them on, which begins a row of tiles. */
static inline int can_be_stored(const struct codes *codes, int64_t count) {
    return codes->kind != HALVES && !codes->above && codes->group > 1 && count > 0 && is_type(codes->type);
}

/* Rows that are stored together: a row of tiles, or, where each row has scales of its own, of a tile of the kernel. */
static inline int64_t stored_together(const struct words *words, const struct codes *codes) {
    return codes->tall == 1 ? words->rows : codes->tall;
}

/* Write W + deltas, W being what codes of eight bits stand for, as codes to `out`, which may be where they are read, and
 * their scales to `raised`. The first of the rows is row `above` of the left factors, which are packed for each row of tiles
 * by itself. Return the largest number, as `finish` does. */
static uint32_t stored_again(const struct words *words, const struct codes *codes, const struct storing *to, uint8_t *out,
                             int64_t rows, int64_t columns, int64_t above, const struct term *terms, int64_t count) {
    const struct weight weight = {.codes = codes, .type = codes->type, .columns = columns};
    const int64_t high = words->rows, together = stored_together(words, codes);
    const int64_t padded = (together + high - 1) / high * high;
    uint32_t largest = 0;
    for (int64_t top = 0, packed = above / together * padded; top < rows; top += together, packed += padded) {
        for (int64_t from = 0; from < columns; from += to->panel) {
            const struct area area = {.row = top,
                                      .rows = least_of(together, rows - top),
                                      .column = from,
                                      .columns = least_of(to->panel, columns - from),
                                      .out = to->scratch,
                                      .apart = to->panel,
                                      .packed = packed};
            uint32_t size = merged_area(words, &weight, &area, F32, terms, count);
            largest = size > largest ? size : largest;
            for (int64_t r = 0; r < area.rows && top + r < to->kept; r++) {
                memcpy(to->meant + (top + r) * columns + from, to->scratch + r * to->panel,
                       (size_t)area.columns * sizeof *to->meant);
            }
            tiles_stored(words, codes, to, out, &area, columns);
        }
    }
    return largest;
}
