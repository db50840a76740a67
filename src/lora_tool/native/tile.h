/* The steps of one tile, compiled once for each level. The level's header says what its words mean:
 *
 *   LEVEL, TARGET              its name, the attribute of its functions
 *   LANES, VECTORS, ROWS       floats in a vector, vectors side by side and rows of a tile
 *   VECTOR, BITS               vectors of floats and of 32-bit integers
 *   ZERO() SET(x) LOAD(p) STORE(p, v) FMA(x, y, z) FMS(x, y, z) MUL(x, y) ADD(x, y)
 *   WIDEN_bf16(p) WIDEN_f16(p) NARROW_bf16(p, v) NARROW_f16(p, v)       elements in memory, as floats
 *   WIDEN_e4m3(p)                                                       codes; half floats with another bias, but for NaN
 *   NARROW_e4m3(p, v)                                                   numbers below 464 in size, as codes
 *   LEAST(x, y) MOST(x, y)                                              y where one is NaN
 *   NOTHING() LARGER(b, v) LARGEST(b)                                   of the bits of |v|, shifted left by one
 */
#define JOINED(a, b) a##_##b
#define JOIN(a, b) JOINED(a, b)
#define NAME(what) JOIN(LEVEL, what)
#define COLUMNS (LANES * VECTORS)
#define UNROLLED _Pragma("GCC unroll 16")
#define WIDEN_f32(p) LOAD(p)
#define NARROW_f32(p, v) STORE(p, v)

_Static_assert(ROWS * COLUMNS <= TILE_MOST, "the tile is larger than its memory");

/* tile = s·chain, or tile + s·chain where there is `more` than one term */
TARGET static void NAME(product)(float *tile, const float *left, const float *right, int64_t depth, float scaling,
                                 int more) {
    VECTOR chain[ROWS][VECTORS], s = SET(scaling);
    UNROLLED for (int r = 0; r < ROWS; r++) {
        UNROLLED for (int v = 0; v < VECTORS; v++) { chain[r][v] = ZERO(); }
    }
    for (int64_t k = 0; k < depth; k++, left += ROWS, right += COLUMNS) {
        VECTOR a[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) { a[v] = LOAD(right + v * LANES); }
        UNROLLED for (int r = 0; r < ROWS; r++) {
            VECTOR b = SET(left[r]);
            UNROLLED for (int v = 0; v < VECTORS; v++) { chain[r][v] = FMA(b, a[v], chain[r][v]); }
        }
    }
    UNROLLED for (int r = 0; r < ROWS; r++) {
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            float *place = tile + r * COLUMNS + v * LANES;
            VECTOR delta = MUL(s, chain[r][v]);
            STORE(place, more ? ADD(LOAD(place), delta) : delta);
        }
    }
}

#include "codes.h"
#include "compare.h"

/* Return the largest |result|, as LARGEST gives it. What lies beyond the last column goes by way of a line of its own. */
#define STEPS(in, in_type, out, out_type)                                                                              \
    TARGET static uint32_t NAME(finish_##in##_##out)(const float *tile, int rows, int columns, const void *source,     \
                                                     int64_t apart, void *to, int64_t stride) {                        \
        BITS most = NOTHING();                                                                                         \
        for (int r = 0; r < rows; r++, tile += COLUMNS) {                                                              \
            const in_type *read = (const in_type *)source + r * apart;                                                 \
            out_type *write = (out_type *)to + r * stride;                                                             \
            in_type read_line[COLUMNS];                                                                                \
            out_type write_line[COLUMNS];                                                                              \
            if (columns < COLUMNS) {                                                                                   \
                memset(read_line, 0, sizeof read_line);                                                                \
                read = memcpy(read_line, read, (size_t)columns * sizeof *read);                                        \
            }                                                                                                          \
            out_type *line = columns < COLUMNS ? write_line : write;                                                   \
            UNROLLED for (int v = 0; v < VECTORS; v++) {                                                               \
                VECTOR total = ADD(WIDEN_##in(read + v * LANES), LOAD(tile + v * LANES));                              \
                most = LARGER(most, total);                                                                            \
                NARROW_##out(line + v * LANES, total);                                                                 \
            }                                                                                                          \
            if (columns < COLUMNS) {                                                                                   \
                memcpy(write, line, (size_t)columns * sizeof *write);                                                  \
            }                                                                                                          \
        }                                                                                                              \
        return LARGEST(most);                                                                                          \
    }                                                                                                                  \
    TARGET static uint32_t NAME(convert_##in##_##out)(const void *source, void *to, int64_t count) {                   \
        const in_type *read = source;                                                                                  \
        out_type *write = to;                                                                                          \
        BITS most = NOTHING();                                                                                         \
        for (; count >= LANES; count -= LANES, read += LANES, write += LANES) {                                        \
            VECTOR value = WIDEN_##in(read);                                                                           \
            most = LARGER(most, value);                                                                                \
            NARROW_##out(write, value);                                                                                \
        }                                                                                                              \
        if (count > 0) {                                                                                               \
            in_type read_line[LANES] = {0};                                                                            \
            out_type write_line[LANES];                                                                                \
            memcpy(read_line, read, (size_t)count * sizeof *read);                                                     \
            VECTOR value = WIDEN_##in(read_line);                                                                      \
            most = LARGER(most, value);                                                                                \
            NARROW_##out(write_line, value);                                                                           \
            memcpy(write, write_line, (size_t)count * sizeof *write);                                                  \
        }                                                                                                              \
        return LARGEST(most);                                                                                          \
    }

STEPS(bf16, uint16_t, bf16, uint16_t)
STEPS(bf16, uint16_t, f16, uint16_t)
STEPS(bf16, uint16_t, f32, float)
STEPS(f16, uint16_t, bf16, uint16_t)
STEPS(f16, uint16_t, f16, uint16_t)
STEPS(f16, uint16_t, f32, float)
STEPS(f32, float, bf16, uint16_t)
STEPS(f32, float, f16, uint16_t)
STEPS(f32, float, f32, float)

/* Raise seen[1] to the largest element under the mask, and mark in seen[2] the bits in which one differs from seen[0]. */
#define SCAN(bits)                                                                                                     \
    TARGET static void NAME(scan_##bits)(const void *block, int64_t count, uint64_t mask, uint64_t *seen) {            \
        const uint##bits##_t *values = block, first = (uint##bits##_t)seen[0], under = (uint##bits##_t)mask;           \
        uint##bits##_t largest = 0, differing = 0;                                                                     \
        for (int64_t at = 0; at < count; at++) {                                                                       \
            const uint##bits##_t magnitude = values[at] & under;                                                       \
            largest = magnitude > largest ? magnitude : largest;                                                       \
            differing |= values[at] ^ first;                                                                           \
        }                                                                                                              \
        seen[1] = largest > seen[1] ? largest : seen[1];                                                               \
        seen[2] |= differing;                                                                                          \
    }

SCAN(8)
SCAN(16)
SCAN(32)
SCAN(64)

#define TABLE(step)                                                                                                    \
    {                                                                                                                  \
        {NAME(step##_bf16_bf16), NAME(step##_bf16_f16), NAME(step##_bf16_f32)},                                        \
            {NAME(step##_f16_bf16), NAME(step##_f16_f16), NAME(step##_f16_f32)},                                       \
            {NAME(step##_f32_bf16), NAME(step##_f32_f16), NAME(step##_f32_f32)},                                       \
    }

static const struct words NAME(words) = {
    ROWS,           COLUMNS,       NAME(product),         TABLE(finish), TABLE(convert),
    NAME(numbers),  NAME(e4m3_of), NAME(int8_of),         NAME(ratios),  NAME(extremes),
    NAME(column_extremes),
    {NAME(scan_8), NAME(scan_16), NAME(scan_32), NAME(scan_64)},
    NAME(compare),
};

#undef JOINED
#undef JOIN
#undef NAME
#undef COLUMNS
#undef UNROLLED
#undef STEPS
#undef SCAN
#undef TABLE
#undef CUT_OFF
#undef WIDEN_f32
#undef NARROW_f32
#undef LEVEL
#undef TARGET
#undef LANES
#undef VECTORS
#undef ROWS
#undef VECTOR
#undef BITS
#undef ZERO
#undef SET
#undef LOAD
#undef STORE
#undef FMA
#undef FMS
#undef MUL
#undef ADD
#undef WIDEN_bf16
#undef WIDEN_f16
#undef WIDEN_e4m3
#undef NARROW_bf16
#undef NARROW_f16
#undef NARROW_e4m3
#undef LEAST
#undef MOST
#undef NOTHING
#undef LARGER
#undef LARGEST
