/* Whole factors at a time: Gram matrices of factors that stand beside one another, and their products with a small matrix.
 * A factor is read as it is stored, whichever way round, and packed a strip at a time; `factors.h` says what its
 * products are. With P the rows of all parts side by side:
 *
 *     gram[i][j] = sums[i][j]; for n = 0, 1, ...: gram[i][j] = fma(P[n][i], P[n][j], gram[i][j])      in float64
 */
struct part {
    const void *values;  /* its element (n, k) is values[n·along + k·down] */
    int64_t along, down; /* elements from one row to the next, and from one column to the next */
    int64_t depth;       /* columns */
    int32_t type;
};

#define DEEP 256 /* rows of which a Gram matrix is added up together: a panel of them stays in the first-level cache */
#define PACKED_MOST (1 << 15) /* numbers that are packed together: they stay in the second-level cache */

static inline int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/* Return how many of the parts are of no known type. */
static int64_t unknown_types(const struct part *parts, int64_t count) {
    int64_t found = 0;
    for (int64_t at = 0; at < count; at++) {
        found += !is_wide_type(parts[at].type);
    }
    return found;
}

static inline int64_t depth_of(const struct part *parts, int64_t count) {
    int64_t depth = 0;
    for (int64_t at = 0; at < count; at++) {
        depth += parts[at].depth;
    }
    return depth;
}

static inline const void *element(const struct part *part, int64_t row, int64_t column) {
    return (const char *)part->values + (size_t)(row * part->along + column * part->down) * wide_size_of(part->type);
}

/* Numbers that `lora_tool_gram` needs: the sums of every tile, and room to work in. */
EXPORT int64_t lora_tool_gram_sums(int level, int64_t depth) {
    const struct words *words = words_of(level);
    return words ? rounded_up(depth, words->panel) * rounded_up(depth, words->wide_columns) : -1;
}
EXPORT int64_t lora_tool_gram_room(int level, int64_t depth) {
    const struct words *words = words_of(level);
    return words ? rounded_up(depth, words->wide_columns) * DEEP : -1;
}

/* Whether the tile has an element on or above the diagonal: the others are known from those. */
static inline int is_above(int64_t row, int64_t column, int64_t wide) { return column + wide > row; }

/* Add rows of the parts to the `sums` of their Gram matrix, tile after tile; zeros at first. Return 0, -1 where this
 * processor does not have the level, or a type is not known. */
EXPORT int lora_tool_gram(int level, const struct part *parts, int64_t count, int64_t length, double *sums, double *room) {
    const struct words *words = words_of(level);
    if (!words || unknown_types(parts, count)) {
        return -1;
    }
    const int64_t high = words->panel, wide = words->wide_columns, depth = depth_of(parts, count), apart = high * DEEP;
    const int64_t whole = depth / high * high, across = rounded_up(depth, wide);
    mode_type before = ieee_mode();
    memset(room + whole * DEEP, 0, (size_t)((across - whole) * DEEP) * sizeof *room);
    for (int64_t first = 0; first < length; first += DEEP) {
        const int64_t deep = least_of(length - first, DEEP);
        int64_t column = 0;
        for (int64_t at = 0; at < count; column += parts[at].depth, at++) {
            pack_lanes(words, room, apart, column, element(parts + at, first, 0), parts[at].type, parts[at].down,
                       parts[at].along, parts[at].depth, deep);
        }
        double *tile = sums;
        for (int64_t row = 0; row < depth; row += high) {
            for (column = 0; column < across; column += wide, tile += high * wide) {
                if (is_above(row, column, wide)) {
                    words->wide_product(tile, room + row * DEEP, room + column * DEEP, deep, apart);
                }
            }
        }
    }
    restore_mode(before);
    return 0;
}

/* Write the whole Gram matrix, `depth` by `depth`, that tiles of `sums` hold. */
EXPORT int lora_tool_gram_matrix(int level, const double *sums, int64_t depth, double *gram) {
    const struct words *words = words_of(level);
    if (!words) {
        return -1;
    }
    const int64_t high = words->panel, wide = words->wide_columns, across = rounded_up(depth, wide);
    for (int64_t row = 0; row < depth; row++) {
        for (int64_t column = row; column < depth; column++) {
            const int64_t tile = (row / high * high) * across + (column / wide * wide) * high;
            gram[row * depth + column] = gram[column * depth + row] = sums[tile + row % high * wide + column % wide];
        }
    }
    return 0;
}

/* Rows that are packed together for a product with a small matrix, in whole tiles. */
static inline int64_t strip_of(const struct words *words, int64_t depth) {
    return rounded_up(PACKED_MOST / (depth < 1 ? 1 : depth), words->wide_columns);
}

/* Numbers that `lora_tool_mix` needs to work in. */
EXPORT int64_t lora_tool_mix_room(int level, int64_t depth, int64_t columns) {
    const struct words *words = words_of(level);
    return words ? (rounded_up(columns, words->wide_columns) + strip_of(words, depth)) * depth : -1;
}

/* Write P·X in `out_type`, `length` rows of `columns`, `stride` elements apart; `below`: Xᵀ·Pᵀ, `columns` rows of `length`.
 * X has a row for every column of P, `apart` numbers from one to the next. Return as `lora_tool_merge`. */
EXPORT int lora_tool_mix(int level, const struct part *parts, int64_t count, int64_t length, const double *matrix,
                         int64_t apart, int64_t columns, int below, void *out, int out_type, int64_t stride, double *room) {
    const struct words *words = words_of(level);
    if (!words || unknown_types(parts, count) || !is_wide_type(out_type)) {
        return -1;
    }
    const int64_t depth = depth_of(parts, count), strip = strip_of(words, depth);
    double *packed = room + rounded_up(columns, words->wide_columns) * depth;
    int flagged = lora_tool_pack_wide(level, room, depth, 0, matrix, F64, columns, depth, 1, apart);
    for (int64_t first = 0; first < length && flagged >= 0; first += strip) {
        const int64_t some = least_of(length - first, strip);
        int64_t deep = 0;
        for (int64_t at = 0; at < count; deep += parts[at].depth, at++) {
            lora_tool_pack_wide(level, packed, depth, deep, element(parts + at, first, 0), parts[at].type, some,
                                parts[at].depth, parts[at].along, parts[at].down);
        }
        char *write = (char *)out + (size_t)(below ? first : first * stride) * wide_size_of(out_type);
        flagged |= below ? lora_tool_product_wide(level, room, packed, depth, write, out_type, stride, columns, some)
                         : lora_tool_product_wide(level, packed, room, depth, write, out_type, stride, some, columns);
    }
    return flagged;
}

#define LINE 256     /* elements of a row that are turned round together: long enough for memory to be read ahead */
#define ROW_BYTES 64 /* of a row of the output that are written together, each from another row: a line of memory */

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
#if __has_builtin(__builtin_shufflevector)
/* Turn round as many rows as a vector has elements: each round takes an element of a row of the upper half and one of the
 * lower half in turn, and the last leaves the first elements of all rows in the first. */
#define SQUARE(type, count)                                                                                            \
    typedef type square_##type __attribute__((vector_size(16)));                                                       \
    static inline void turn_square_##type(const type *lines, type *out, int64_t stride) {                              \
        square_##type rows[count], next[count];                                                                        \
        _Pragma("GCC unroll 8") for (int r = 0; r < count; r++) { memcpy(rows + r, lines + r * LINE, 16); }            \
        _Pragma("GCC unroll 3") for (int round = 1; round < count; round *= 2) {                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < count / 2; r++) {                                              \
                next[2 * r] = FIRST_##type(rows[r], rows[r + count / 2]);                                              \
                next[2 * r + 1] = LAST_##type(rows[r], rows[r + count / 2]);                                           \
            }                                                                                                          \
            memcpy(rows, next, sizeof rows);                                                                           \
        }                                                                                                              \
        _Pragma("GCC unroll 8") for (int r = 0; r < count; r++) { memcpy(out + r * stride, rows + r, 16); }            \
    }
#define FIRST_uint16_t(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define LAST_uint16_t(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define FIRST_uint32_t(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define LAST_uint32_t(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define FIRST_uint64_t(a, b) __builtin_shufflevector(a, b, 0, 2)
#define LAST_uint64_t(a, b) __builtin_shufflevector(a, b, 1, 3)
#else
#define SQUARE(type, count)                                                                                            \
    static inline void turn_square_##type(const type *lines, type *out, int64_t stride) {                              \
        for (int c = 0; c < count; c++) {                                                                              \
            for (int r = 0; r < count; r++) {                                                                          \
                out[c * stride + r] = lines[r * LINE + c];                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }
#endif

/* Write lines of LINE elements, `high` of them, as columns: `wide` rows that lie `stride` elements apart. */
#define TURN(type, count)                                                                                              \
    SQUARE(type, count)                                                                                                \
    static void turn_##type(const type *lines, type *out, int64_t stride, int64_t high, int64_t wide) {                \
        const int64_t below = high / count * count, beside = wide / count * count;                                     \
        for (int64_t c = 0; c < beside; c += count) {                                                                  \
            for (int64_t r = 0; r < below; r += count) {                                                               \
                turn_square_##type(lines + r * LINE + c, out + c * stride + r, stride);                                \
            }                                                                                                          \
        }                                                                                                              \
        for (int64_t c = 0; c < wide; c++) {                                                                           \
            for (int64_t r = c < beside ? below : 0; r < high; r++) {                                                  \
                out[c * stride + r] = lines[r * LINE + c];                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }
TURN(uint16_t, 8)
TURN(uint32_t, 4)
TURN(uint64_t, 2)

/* Copy bits of numbers, and return whether one is NaN or infinite: all bits of its `exponent` are set. */
#define COPIED(type)                                                                                                   \
    static int copied_##type(const type *restrict values, type *restrict out, int64_t count, type exponent) {          \
        int found = 0;                                                                                                 \
        for (int64_t at = 0; at < count; at++) {                                                                       \
            out[at] = values[at];                                                                                      \
            found |= (values[at] & exponent) == exponent;                                                              \
        }                                                                                                              \
        return found;                                                                                                  \
    }
COPIED(uint16_t)
COPIED(uint32_t)

/* Write `scale` times a line of at most LINE elements, rounded once; return the largest |result| as `rounded` does. */
static uint32_t scaled_line(const struct words *words, const void *values, int source_type, double scale, void *out,
                            int out_type, int64_t count) {
    if (source_type == out_type && scale == 1.0 && out_type != F64) { /* each rounds to itself */
        const int found = out_type == F32 ? copied_uint32_t(values, out, count, 0x7F800000u)
                                          : copied_uint16_t(values, out, count, out_type == BF16 ? 0x7F80u : 0x7C00u);
        return found ? UINT32_MAX : 0;
    }
    _Alignas(64) double line[LINE];
    words->scaled[source_type](line, values, 1, scale, count);
    return words->rounded(line, out, out_type, 1, count);
}

/* Write a matrix of `rows` by `columns`, whose rows lie `apart` elements from each other, transposed: each element times
 * `scale`, rounded to float64 and then once to `out_type`, in rows of `stride`. Return as `lora_tool_merge`. */
EXPORT int lora_tool_turn(int level, const void *source, int source_type, int64_t apart, void *out, int out_type,
                          int64_t stride, int64_t rows, int64_t columns, double scale) {
    const struct words *words = words_of(level);
    if (!words || !is_wide_type(source_type) || !is_wide_type(out_type)) {
        return -1;
    }
    const struct part part = {.values = source, .along = apart, .down = 1, .type = source_type};
    const size_t size = wide_size_of(out_type);
    const int64_t together = ROW_BYTES / (int64_t)size;
    const int64_t down = (rows + together - 1) / together, across = (columns + LINE - 1) / LINE;
    mode_type before = ieee_mode();
    uint32_t largest = 0;
    for (int64_t at = 0; at < down * across; at++) { /* along the longer side last */
        const int64_t row = (rows > columns ? at / across : at % down) * together;
        const int64_t column = (rows > columns ? at % across : at / down) * LINE;
        const int64_t high = least_of(rows - row, together), wide = least_of(columns - column, LINE);
        _Alignas(64) uint64_t lines[ROW_BYTES * LINE / sizeof(uint64_t)];
        for (int64_t r = 0; r < high; r++) {
            char *line = (char *)lines + (size_t)(r * LINE) * size;
            uint32_t found = scaled_line(words, element(&part, row + r, column), source_type, scale, line, out_type, wide);
            largest = found > largest ? found : largest;
        }
        char *write = (char *)out + (size_t)(column * stride + row) * size;
        if (size == 2) {
            turn_uint16_t((uint16_t *)lines, (uint16_t *)write, stride, high, wide);
        } else if (size == 4) {
            turn_uint32_t((uint32_t *)lines, (uint32_t *)write, stride, high, wide);
        } else {
            turn_uint64_t(lines, (uint64_t *)write, stride, high, wide);
        }
    }
    restore_mode(before);
    return is_too_large(largest, out_type);
}

/* A matrix in an open file that goes transposed to another. */
struct turning {
    int64_t from, to;      /* where in the files it begins, and the first row that is written */
    int64_t rows, columns; /* as it is stored */
    int64_t first, last;   /* columns that are written, each as a row */
    int64_t stride;        /* elements of a row that is written: zeros after those of the matrix */
    int64_t high, wide;    /* rows and columns that are in memory together: all of one of the two */
    int64_t line;          /* elements of a row that are in memory: `columns`, of which not all may be written, or `wide` */
    int64_t some;          /* bytes of a write */
    void *read, *made;     /* memory of a block, and of what is made of it, with its zeros */
    double scale;
    int32_t source, out; /* descriptors */
    int32_t source_type, out_type;
};

/* Return whether rows of a matrix could be read, all columns or those from `column` on, one row after the other. */
static int read_block(const struct turning *turning, int64_t row, int64_t high, int64_t column, int64_t wide) {
    const int64_t size = (int64_t)wide_size_of(turning->source_type), whole = turning->columns * size;
    const int64_t from = turning->from + row * whole;
    if (turning->line == turning->columns) {
        return read_whole(turning->source, turning->read, high * whole, from);
    }
    for (int64_t r = 0; r < high; r++) {
        char *read = (char *)turning->read + r * turning->line * size;
        if (!read_whole(turning->source, read, wide * size, from + r * whole + column * size)) {
            return 0;
        }
    }
    return 1;
}

/* Return whether rows of the result could be written, `high` elements of each from `row` on. */
static int write_block(const struct turning *turning, int64_t row, int64_t high, int64_t column, int64_t wide) {
    const int64_t size = (int64_t)wide_size_of(turning->out_type), whole = turning->stride * size;
    const int64_t to = turning->to + (column - turning->first) * whole + row * size;
    if (high == turning->rows) {
        return lora_tool_write(turning->out, turning->made, wide * whole, to, turning->some) == wide * whole;
    }
    for (int64_t c = 0; c < wide; c++) {
        const char *made = (const char *)turning->made + c * high * size;
        if (lora_tool_write(turning->out, made, high * size, to + c * whole, turning->some) < high * size) {
            return 0;
        }
    }
    return 1;
}

/* Read a matrix, turn it round as `lora_tool_turn` does, and write it; rows that have zeros after it are written whole.
 * Return whether all of it was: not where the system refused, or a result was NaN or infinite. */
EXPORT int lora_tool_turn_pass(int level, const struct turning *turning) {
    if (!is_wide_type(turning->source_type) || !is_wide_type(turning->out_type)) {
        return 0;
    }
    if (turning->stride != turning->rows) {
        memset(turning->made, 0, (size_t)(turning->wide * turning->stride) * wide_size_of(turning->out_type));
    }
    for (int64_t row = 0; row < turning->rows; row += turning->high) {
        const int64_t high = least_of(turning->high, turning->rows - row);
        for (int64_t column = turning->first; column < turning->last; column += turning->wide) {
            const int64_t wide = least_of(turning->wide, turning->last - column);
            const int64_t before = turning->line == turning->columns ? column : 0;
            const char *read = (const char *)turning->read + (size_t)before * wide_size_of(turning->source_type);
            if (!read_block(turning, row, high, column, wide) ||
                lora_tool_turn(level, read, turning->source_type, turning->line, turning->made, turning->out_type,
                               high == turning->rows ? turning->stride : high, high, wide, turning->scale) ||
                !write_block(turning, row, high, column, wide)) {
                return 0;
            }
        }
    }
    return 1;
}
