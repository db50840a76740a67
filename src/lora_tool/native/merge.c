/* The arithmetic of `--precision float32`, compiled: W + sum of s·(B·A), rounded once to storage, in one pass.
 *
 * One definition, whatever the machine. For every element, with fma(x, y, z) = x·y + z rounded once:
 *
 *     chain = 0; for k = 0, 1, ...: chain = fma(b[k], a[k], chain)      in float32
 *     delta = s·chain, rounded; the deltas of several terms are added in their order, each sum rounded
 *     out   = W + delta, rounded to float32; then rounded to the type that is stored: to nearest, ties to even
 *
 * Subnormal numbers are kept, whatever mode the thread is in. A result that is NaN or infinite is flagged: whoever calls
 * computes the block again in another way, which names the cause. No memory is allocated and no thread is started here;
 * sizes are the caller's to check.
 *
 * A level is one set of vector instructions: `tile.h` is written once, and compiled with the words of each.
 */
#define _XOPEN_SOURCE 700    /* pread, pwrite and clock_gettime, */
#define _FILE_OFFSET_BITS 64 /* also beyond 2 GB where a long has 32 bits */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "lora-tool's kernel promises IEEE arithmetic: compile it without -ffast-math and -Ofast"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "lora-tool's kernel works on the little-endian bytes of the files"
#endif
#if FLT_EVAL_METHOD != 0
#error "lora-tool's kernel needs float operations that are rounded to float: on 32-bit x86, -msse2 -mfpmath=sse"
#endif

#define EXPORT __attribute__((visibility("default")))
#define VERSION 1 /* of the functions below; native/library.py asks for it */

enum type { BF16, F16, F32, TYPES };
enum level { SCALAR, AVX2, AVX512, NEON };

#define ROWS_MOST 12
#define TILE_MOST (ROWS_MOST * 32) /* floats of the largest tile */
#define STRIP 512                  /* columns of a quantised weight that are decoded together */

/* |x| of float32 from which rounding gives an infinity, NaN included: bits without the sign, shifted left by one */
static const uint32_t too_large[TYPES] = {0xFEFF0000u, 0x8EFFE000u, 0xFF000000u};

struct term {
    const float *left, *right; /* packed by `lora_tool_pack` for this level */
    int64_t depth;
    double scaling;
};

/* Rows of codes with their scales, which stand for numbers; see codes.h */
struct codes {
    const uint8_t *bytes;
    const float *table; /* where a byte is two codes: what each byte stands for, 256 times two */
    const float *scales;
    int64_t stride, apart; /* bytes from row to row, scales from one row of them to the next */
    int64_t group;         /* columns with one scale, an even number where a byte is two codes and there are several */
    int64_t tall, above;   /* rows with one row of scales, and how many of them lie above the first row here */
    float again;
    int32_t kind, type; /* and what the numbers are rounded to before anything is added */
};

enum kind { E4M3, INT8, HALVES };

static inline const float *scales_at(const struct codes *codes, int64_t row) {
    return codes->scales + (row + codes->above) / codes->tall * codes->apart;
}

typedef void product_function(float *tile, const float *left, const float *right, int64_t depth, float scaling, int more);
typedef uint32_t finish_function(const float *tile, int rows, int columns, const void *source, int64_t apart, void *out,
                                 int64_t stride);
typedef uint32_t convert_function(const void *source, void *out, int64_t count);
typedef void numbers_function(float *out, const struct codes *codes, int64_t row, int64_t column, int64_t count);
typedef void ratios_function(float *out, const float *numbers, const float *scales, int64_t count, int divided);
typedef void extremes_function(const float *numbers, int64_t apart, int64_t rows, int64_t count, float *low,
                               float *high);
typedef void column_extremes_function(const float *numbers, int64_t count, float *low, float *high);
typedef void e4m3_function(uint8_t *out, int64_t stride, const float *numbers, int64_t apart, int64_t rows, int64_t count,
                           float scale);
typedef void int8_function(uint8_t *out, const float *numbers, float scale, int64_t count, int divided, float least);

typedef void scan_function(const void *block, int64_t count, uint64_t mask, uint64_t *seen);

typedef __attribute__((vector_size(16))) uint16_t eight_halves;
typedef __attribute__((vector_size(32))) int32_t eight_words;
typedef __attribute__((vector_size(32))) float eight_floats;
typedef __attribute__((vector_size(64))) double eight_doubles;
typedef float compare_function(const uint16_t *stored, const uint16_t *base, const int *types, const double *change,
                               int64_t count, double *totals);

struct words {
    int rows, columns; /* of a tile */
    product_function *product;
    finish_function *finish[TYPES][TYPES];
    convert_function *convert[TYPES][TYPES];
    numbers_function *numbers;
    e4m3_function *e4m3_of;
    int8_function *int8_of;
    ratios_function *ratios;
    extremes_function *extremes;
    column_extremes_function *column_extremes;
    scan_function *scan[4]; /* of 1, 2, 4 and 8 bytes */
    compare_function *compare;
};

static inline int64_t least_of(int64_t one, int64_t other) { return one < other ? one : other; }

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bf16(uint16_t stored) { return float_of((uint32_t)stored << 16); }

static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static inline float from_f16(uint16_t stored) {
    uint32_t sign = (uint32_t)(stored & 0x8000u) << 16, exponent = stored >> 10 & 31u, fraction = stored & 0x3FFu;
    if (exponent == 0) {
        float value = (float)fraction * 0x1p-24f;
        return float_of(sign | bits_of(value));
    }
    return float_of(sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13);
}

static inline uint16_t to_f16(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    if (size >= 0x477FF000u) { /* flagged */
        return (uint16_t)(sign | 0x7C00u);
    }
    if (size < 0x38800000u) { /* subnormal: half has the distance of subnormal neighbours as its last place */
        return (uint16_t)(sign | (bits_of(float_of(size) + 0.5f) - 0x3F000000u));
    }
    return (uint16_t)(sign | (size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13);
}

static inline float from_e4m3(uint8_t stored) {
    const uint32_t size = stored & 0x7Fu, sign = (uint32_t)(stored & 0x80u) << 24;
    /* below 2^-6 numbers are as far apart as those above it, whose first bit is not stored and taken off again */
    const uint32_t first = size < 8 ? 121u << 23 : 120u << 23;
    const float off = size < 8 ? 0x1p-6f : 0.0f, value = float_of((size << 20) + first) - off;
    return float_of((size == 0x7F ? 0x7FC00000u : bits_of(value)) | sign);
}

static inline uint8_t to_e4m3(float value) {
    uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFFu;
    /* below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves their number in the last bits */
    uint32_t small = bits_of(float_of(size) + 0x1p14f) - 0x46800000u;
    uint32_t normal = ((size + 0x7FFFFu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    return (uint8_t)((size < 121u << 23 ? small : normal) | (bits >> 24 & 0x80u));
}

#include "scalar.h"
#if defined(__x86_64__)
#include "avx2.h"
#include "avx512.h"
#elif defined(__aarch64__)
#include "neon.h"
#endif

static const struct words *words_of(int level) {
    switch (level) {
    case SCALAR:
        return &scalar_words;
#if defined(__x86_64__)
    case AVX2:
        return avx2_runs() ? &avx2_words : 0;
    case AVX512:
        return avx512_runs() ? &avx512_words : 0;
#elif defined(__aarch64__)
    case NEON:
        return &neon_words;
#endif
    default:
        return 0;
    }
}

/* Subnormal numbers are kept and ties go to even from the one to the other: another library may have set its own mode */
#if defined(__x86_64__)
typedef unsigned mode_type;
static inline mode_type ieee_mode(void) {
    mode_type before = _mm_getcsr();
    _mm_setcsr(0x1F80); /* all exceptions masked */
    return before;
}
static inline void restore_mode(mode_type before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
typedef uint64_t mode_type;
static inline mode_type ieee_mode(void) {
    mode_type before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"((mode_type)0) : "memory");
    return before;
}
static inline void restore_mode(mode_type before) { __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory"); }
#else
#include <fenv.h>
typedef fenv_t mode_type;
static inline mode_type ieee_mode(void) {
    mode_type before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}
static inline void restore_mode(mode_type before) { fesetenv(&before); }
#endif

EXPORT int lora_tool_version(void) { return VERSION; }

/* Which sources this was compiled from. */
EXPORT const char *lora_tool_sources(void) {
#ifdef LORA_TOOL_SOURCES
    return LORA_TOOL_SOURCES;
#else
    return "";
#endif
}

/* Rows and columns of a tile of the level; 0 where this processor does not have it. */
EXPORT int lora_tool_rows(int level) { return words_of(level) ? words_of(level)->rows : 0; }
EXPORT int lora_tool_columns(int level) { return words_of(level) ? words_of(level)->columns : 0; }

static float value_at(const void *factor, int type, int64_t at) {
    switch (type) {
    case BF16:
        return from_bf16(((const uint16_t *)factor)[at]);
    case F16:
        return from_f16(((const uint16_t *)factor)[at]);
    default:
        return ((const float *)factor)[at];
    }
}

static inline size_t size_of(int type) { return type == F32 ? 4 : 2; }

/* Lay out a factor of `length` (the rows of B, the columns of A) by `depth` in panels of `width`, float32, zeros at the
 * end: packed[panel][k][lane]. Its element (i, k) is factor[i·along + k·down]. */
EXPORT void lora_tool_pack(float *packed, int64_t width, const void *factor, int type, int64_t length, int64_t depth,
                           int64_t along, int64_t down) {
    for (int64_t first = 0; first < length; first += width, packed += width * depth) {
        int64_t lanes = length - first < width ? length - first : width;
        if (lanes < width) {
            memset(packed, 0, (size_t)(width * depth) * sizeof *packed);
        }
        if (along == 1 && type == F32) {
            for (int64_t k = 0; k < depth; k++) {
                memcpy(packed + k * width, (const float *)factor + first + k * down, (size_t)lanes * sizeof *packed);
            }
        } else if (along == 1) {
            for (int64_t k = 0; k < depth; k++) {
                for (int64_t lane = 0; lane < lanes; lane++) {
                    packed[k * width + lane] = value_at(factor, type, first + lane + k * down);
                }
            }
        } else {
            for (int64_t lane = 0; lane < lanes; lane++) {
                for (int64_t k = 0; k < depth; k++) {
                    packed[k * width + lane] = value_at(factor, type, (first + lane) * along + k * down);
                }
            }
        }
    }
}

/* Columns whose right factors stay in the second-level cache while the rows go by. */
#define CACHED_BYTES (256 << 10)

/* Write some columns of some rows of what codes stand for, rounded to their type, to rows that lie STRIP apart. */
static void decode_strip(const struct words *words, const struct codes *codes, int64_t row, int some, int64_t column,
                         int64_t count, void *out) {
    for (int r = 0; r < some; r++) {
        if (codes->type == F32) {
            words->numbers((float *)out + r * STRIP, codes, row + r, column, count);
        } else {
            _Alignas(64) float line[STRIP];
            words->numbers(line, codes, row + r, column, count);
            words->convert[F32][codes->type](line, (uint16_t *)out + r * STRIP, count);
        }
    }
}

/* W: what is stored, or what codes stand for. */
struct weight {
    const void *source;
    const struct codes *codes;
    int type;
    int64_t columns;
};

/* Some rows and columns of W, and where their results go: rows that lie `apart` elements from each other. */
struct area {
    int64_t row, rows, column, columns;
    void *out;
    int64_t apart;
    int64_t packed; /* the row of the left factors that the first row has */
};

static uint32_t merged_area(const struct words *words, const struct weight *weight, const struct area *area, int out_type,
                            const struct term *terms, int64_t count) {
    const int64_t high = words->rows, wide = words->columns, columns = weight->columns;
    const struct codes *codes = weight->codes;
    const size_t source_size = size_of(weight->type), out_size = size_of(out_type);
    const int64_t last_row = area->row + area->rows, last_column = area->column + area->columns;
    const int64_t strip = codes ? STRIP / wide * wide : area->columns;
    finish_function *finish = words->finish[weight->type][out_type];
    uint32_t largest = 0;
    for (int64_t row = area->row; row < last_row; row += high) {
        int some = (int)least_of(last_row - row, high);
        const int64_t down = row - area->row, packed = area->packed + down;
        for (int64_t first = area->column; first < last_column; first += strip) {
            _Alignas(64) char numbers[ROWS_MOST * STRIP * sizeof(float)];
            int64_t last = least_of(first + strip, last_column);
            if (codes) {
                decode_strip(words, codes, row, some, first, last - first, numbers);
            }
            for (int64_t column = first; column < last; column += wide) {
                _Alignas(64) float tile[TILE_MOST];
                const int64_t apart = codes ? STRIP : columns;
                const char *read = codes ? numbers + (size_t)(column - first) * source_size
                                         : (const char *)weight->source + (size_t)(row * columns + column) * source_size;
                for (int r = 0; r < some && !codes; r++) {
                    __builtin_prefetch(read + (size_t)(r * columns) * source_size);
                }
                for (int64_t t = 0; t < count; t++) {
                    const int64_t depth = terms[t].depth;
                    const float *left = terms[t].left + packed * depth, *right = terms[t].right + column * depth;
                    words->product(tile, left, right, depth, (float)terms[t].scaling, t > 0);
                }
                int across = (int)least_of(last_column - column, wide);
                char *write = (char *)area->out + (size_t)(down * area->apart + column - area->column) * out_size;
                uint32_t size = finish(tile, some, across, read, apart, write, area->apart);
                largest = size > largest ? size : largest;
            }
        }
    }
    return largest;
}

/* Write W + deltas of `rows` rows, the first of which has the row `packed` of the left factors. */
static uint32_t merged(const struct words *words, const struct weight *weight, void *out, int out_type, int64_t rows,
                       int64_t packed, const struct term *terms, int64_t count) {
    const int64_t wide = words->columns, columns = weight->columns;
    int64_t depth = 1;
    for (int64_t t = 0; t < count; t++) {
        depth += terms[t].depth;
    }
    int64_t cached = CACHED_BYTES / (depth * wide * (int64_t)sizeof(float)) * wide;
    cached = cached < wide ? wide : cached;
    uint32_t largest = 0;
    for (int64_t from = 0; from < columns; from += cached) {
        const struct area area = {.rows = rows,
                                  .column = from,
                                  .columns = least_of(cached, columns - from),
                                  .out = (char *)out + (size_t)from * size_of(out_type),
                                  .apart = columns,
                                  .packed = packed};
        uint32_t size = merged_area(words, weight, &area, out_type, terms, count);
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* Write what codes stand for, `rows` by `columns` elements, in another type. */
static uint32_t decoded(const struct words *words, const struct codes *codes, void *out, int out_type, int64_t rows,
                        int64_t columns) {
    uint32_t largest = 0;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t column = 0; column < columns; column += STRIP) {
            _Alignas(64) char numbers[STRIP * sizeof(float)];
            const int64_t count = least_of(columns - column, STRIP);
            decode_strip(words, codes, row, 1, column, count, numbers);
            char *write = (char *)out + (size_t)(row * columns + column) * size_of(out_type);
            uint32_t size = words->convert[codes->type][out_type](numbers, write, count);
            largest = size > largest ? size : largest;
        }
    }
    return largest;
}

static inline int is_type(int type) { return type >= 0 && type < TYPES; }

/* Write W + deltas of `rows` by `columns` elements, row after row. `out` may be `source` where both types are of one
 * size. Return 1 where a result is NaN or infinite (then `out` is not to be used), 0 where all are finite,
 * -1 where this processor does not have the level. */
EXPORT int lora_tool_merge(int level, const void *source, int source_type, void *out, int out_type, int64_t rows,
                           int64_t columns, const struct term *terms, int64_t count) {
    const struct words *words = words_of(level);
    if (!words || !is_type(source_type) || !is_type(out_type)) {
        return -1;
    }
    const struct weight weight = {.source = source, .type = source_type, .columns = columns};
    mode_type before = ieee_mode();
    uint32_t largest = merged(words, &weight, out, out_type, rows, 0, terms, count);
    restore_mode(before);
    return largest >= too_large[out_type];
}

/* As `lora_tool_merge`, where W is what codes stand for; without terms W alone is written. */
EXPORT int lora_tool_merge_codes(int level, const struct codes *codes, void *out, int out_type, int64_t rows,
                                 int64_t columns, const struct term *terms, int64_t count) {
    const struct words *words = words_of(level);
    if (!words || !is_type(codes->type) || !is_type(out_type)) {
        return -1;
    }
    const struct weight weight = {.codes = codes, .type = codes->type, .columns = columns};
    mode_type before = ieee_mode();
    uint32_t largest = count ? merged(words, &weight, out, out_type, rows, 0, terms, count)
                             : decoded(words, codes, out, out_type, rows, columns);
    restore_mode(before);
    return largest >= too_large[out_type];
}

#include "requantise.h"

/* Write `count` elements of one type as another, rounded once. In place and returned as by `lora_tool_merge`. */
EXPORT int lora_tool_convert(int level, const void *source, int source_type, void *out, int out_type, int64_t count) {
    const struct words *words = words_of(level);
    if (!words || !is_type(source_type) || !is_type(out_type)) {
        return -1;
    }
    mode_type before = ieee_mode();
    uint32_t largest = words->convert[source_type][out_type](source, out, count);
    restore_mode(before);
    return largest >= too_large[out_type];
}

/* Compare `count` elements, a multiple of eight: from[0] as stored, from[1] of the base. Write the largest |error| of each
 * 1024, in half units in the last place that is stored, and add up error², change², moved² and moved·change. */
EXPORT void lora_tool_compare(int level, const uint16_t *const *from, const int *types, const double *change,
                              int64_t count, float *largest, double *totals) {
    mode_type before = ieee_mode();
    for (int64_t at = 0; at < count; at += 1024) {
        const int64_t some = least_of(count - at, 1024);
        *largest++ = words_of(level)->compare(from[0] + at, from[1] + at, types, change + at, some, totals);
    }
    restore_mode(before);
}

#include "files.h"
