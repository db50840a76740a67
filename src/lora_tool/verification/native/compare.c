/* How far stored values are from what they should be, compiled: one pass where numpy takes a dozen. And whether copies
 * are the bytes of their sources, which may lie transposed in a file.
 *
 * Nothing here is shared with the kernel that writes; what the values should be is computed elsewhere, in float64. For
 * every element, in float32 where the stored type has 16 bits, in float64 otherwise, each operation rounded:
 *
 *     moved = stored - base; error = moved - change; ratio = |error| / half
 *
 * where half is half the distance of the stored value to its neighbour away from zero. Sums are taken in a fixed order,
 * so that they are the same on every machine. Subnormal numbers are the caller's to keep on.
 */
#define _XOPEN_SOURCE 700    /* pread, */
#define _FILE_OFFSET_BITS 64 /* also beyond 2 GB where a long has 32 bits */
#include <float.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "lora-tool's comparison promises IEEE arithmetic: compile it without -ffast-math and -Ofast"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "lora-tool's comparison works on the little-endian bytes of the files"
#endif
#if FLT_EVAL_METHOD != 0
#error "lora-tool's comparison needs float operations that are rounded to float: on 32-bit x86, -msse2 -mfpmath=sse"
#endif

#define EXPORT __attribute__((visibility("default")))
#define VERSION 3 /* of the functions below; native/__init__.py names it */

enum type { BF16, F16, F32, F64, TYPES };

/* For each: its unit roundoff, and half the distance of its subnormal numbers, or the least that the working type has */
static const double roundoff[TYPES] = {0x1p-8, 0x1p-11, 0x1p-24, 0x1p-53};
static const double least[TYPES] = {0x1p-134, 0x1p-25, 0x1p-150, 0x1p-1074};

#define LISTED 64
struct seen {
    double error, change, moved, dot; /* sums of squares, and of moved·change */
    double largest;                   /* ratio of those that are at most the bound */
    int64_t is_moved;                 /* whether a value is not the base's */
    int64_t outside;                  /* how many ratios are more than the bound, or NaN */
    int64_t places[LISTED];           /* of the first of them */
};

static inline float bf16_of(uint16_t stored) {
    uint32_t bits = (uint32_t)stored << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The exponent is moved by a product, which is exact and makes normal numbers of subnormal ones. */
static inline float f16_of(uint16_t stored) {
    uint32_t bits = (uint32_t)(stored & 0x7FFFu) << 13, sign = (uint32_t)(stored & 0x8000u) << 16;
    uint32_t special = (stored & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    bits |= sign | special;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Vectors of GCC and clang, whatever the processor has */
#define VECTOR(type, lanes) __attribute__((vector_size((lanes) * sizeof(type)))) type
typedef int32_t word;
typedef int64_t long_word;
typedef VECTOR(float, 8) floats;
typedef VECTOR(word, 8) words;
typedef VECTOR(double, 4) doubles;
typedef VECTOR(long_word, 4) long_words;

#define PART 1024 /* elements that lie in the first-level cache; sums of so many are added in float64 */
#define LANES 8   /* of the widest */

/* The steps in one working type. SIZE is the bits of BITS without the sign, EXPONENT those of the exponent. */
#define STEPS(TARGET, LEVEL, FLOAT, BITS, SIZE, EXPONENT)                                                              \
    /* Write elements of any type in the working one, and zeros up to a whole vector. */                               \
    TARGET static void LEVEL##_widen_##FLOAT(FLOAT *out, const void *from, enum type type, int64_t first,              \
                                             int64_t count) {                                                          \
        switch (type) {                                                                                                \
        case BF16:                                                                                                     \
            for (int64_t at = 0; at < count; at++) {                                                                   \
                out[at] = (FLOAT)bf16_of(((const uint16_t *)from)[first + at]);                                        \
            }                                                                                                          \
            break;                                                                                                     \
        case F16:                                                                                                      \
            for (int64_t at = 0; at < count; at++) {                                                                   \
                out[at] = (FLOAT)f16_of(((const uint16_t *)from)[first + at]);                                         \
            }                                                                                                          \
            break;                                                                                                     \
        case F32:                                                                                                      \
            for (int64_t at = 0; at < count; at++) {                                                                   \
                out[at] = (FLOAT)((const float *)from)[first + at];                                                    \
            }                                                                                                          \
            break;                                                                                                     \
        default:                                                                                                       \
            for (int64_t at = 0; at < count; at++) {                                                                   \
                out[at] = (FLOAT)((const double *)from)[first + at];                                                   \
            }                                                                                                          \
        }                                                                                                              \
        for (int64_t at = count; at % LANES; at++) {                                                                   \
            out[at] = 0;                                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    /* Write the ratios of whole vectors in place of `values`, and return the largest: NaN is larger than all. */      \
    TARGET static FLOAT LEVEL##_sums_##FLOAT(FLOAT *values, const FLOAT *base, const FLOAT *change, int64_t count,     \
                                             FLOAT unit, FLOAT lowest, struct seen *seen) {                            \
        const int64_t lanes = sizeof(FLOAT##s) / sizeof(FLOAT);                                                        \
        FLOAT##s errors = {0}, changes = {0}, moves = {0}, dots = {0}, floor = errors + lowest;                        \
        BITS##s largest = {0}, any = {0};                                                                              \
        for (int64_t at = 0; at < count; at += lanes) {                                                                \
            FLOAT##s value, from, by;                                                                                  \
            memcpy(&value, values + at, sizeof value);                                                                 \
            memcpy(&from, base + at, sizeof from);                                                                     \
            memcpy(&by, change + at, sizeof by);                                                                       \
            FLOAT##s moved = value - from, error = moved - by, half = (FLOAT##s)((BITS##s)value & EXPONENT) * unit;    \
            BITS##s more = (BITS##s)half > (BITS##s)floor; /* positive numbers are ordered as their bits */            \
            half = (FLOAT##s)(((BITS##s)half & more) | ((BITS##s)floor & ~more));                                      \
            BITS##s ratio = (BITS##s)(error / half) & SIZE;                                                            \
            memcpy(values + at, &ratio, sizeof ratio);                                                                 \
            more = ratio > largest;                                                                                    \
            largest = (ratio & more) | (largest & ~more);                                                              \
            any |= (BITS##s)moved & SIZE;                                                                              \
            errors += error * error;                                                                                   \
            changes += by * by;                                                                                        \
            moves += moved * moved;                                                                                    \
            dots += moved * by;                                                                                        \
        }                                                                                                              \
        BITS most = 0;                                                                                                 \
        for (int lane = 0; lane < lanes; lane++) {                                                                     \
            seen->error += (double)errors[lane];                                                                       \
            seen->change += (double)changes[lane];                                                                     \
            seen->moved += (double)moves[lane];                                                                        \
            seen->dot += (double)dots[lane];                                                                           \
            seen->is_moved |= any[lane] != 0;                                                                          \
            most = largest[lane] > most ? largest[lane] : most;                                                        \
        }                                                                                                              \
        FLOAT ratio;                                                                                                   \
        memcpy(&ratio, &most, sizeof ratio);                                                                           \
        return ratio;                                                                                                  \
    }                                                                                                                  \
    TARGET static void LEVEL##_##FLOAT(const void *const *from, const int *types, int64_t count, double bound,         \
                                       struct seen *seen) {                                                            \
        for (int64_t done = 0; done < count; done += PART) {                                                           \
            int64_t some = count - done < PART ? count - done : PART, whole = (some + LANES - 1) / LANES * LANES;      \
            FLOAT parts[3][PART];                                                                                      \
            for (int which = 0; which < 3; which++) {                                                                  \
                LEVEL##_widen_##FLOAT(parts[which], from[which], (enum type)types[which], done, some);                 \
            }                                                                                                          \
            FLOAT most = LEVEL##_sums_##FLOAT(parts[0], parts[1], parts[2], whole, (FLOAT)roundoff[types[0]],          \
                                              (FLOAT)least[types[0]], seen);                                           \
            if (most <= bound) {                                                                                       \
                seen->largest = most > seen->largest ? most : seen->largest;                                           \
                continue;                                                                                              \
            }                                                                                                          \
            for (int64_t at = 0; at < some; at++) {                                                                    \
                FLOAT ratio = parts[0][at];                                                                            \
                if (ratio <= bound) {                                                                                  \
                    seen->largest = ratio > seen->largest ? ratio : seen->largest;                                     \
                } else if (seen->outside++ < LISTED) {                                                                 \
                    seen->places[seen->outside - 1] = done + at;                                                       \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

#define BOTH(TARGET, LEVEL)                                                                                            \
    STEPS(TARGET, LEVEL, float, word, INT32_MAX, 0x7F800000)                                                        \
    STEPS(TARGET, LEVEL, double, long_word, INT64_MAX, 0x7FF0000000000000)

BOTH(, plain)
#if defined(__x86_64__)
BOTH(__attribute__((target("avx2"))), avx2)
#define BEST(FLOAT) (__builtin_cpu_supports("avx2") ? avx2_##FLOAT : plain_##FLOAT)
#else
#define BEST(FLOAT) plain_##FLOAT
#endif

EXPORT int lora_tool_compare_version(void) { return VERSION; }

/* Compare `count` elements of from[0], what is stored, with base + change, from[1] and from[2], each of its type. They
 * are rounded to float32 first where the stored type has 16 bits, to float64 otherwise. Return -1 for an unknown type. */
EXPORT int lora_tool_compare(const void *const *from, const int *types, int64_t count, double bound, struct seen *seen) {
    for (int which = 0; which < 3; which++) {
        if (types[which] < 0 || types[which] >= TYPES) {
            return -1;
        }
    }
    *seen = (struct seen){0};
    (types[0] == BF16 || types[0] == F16 ? BEST(float) : BEST(double))(from, types, count, bound, seen);
    return 0;
}

/* Bytes of one file that are to be those of another: as they lie in it, or as a matrix [rows, columns] has them that lies
 * there transposed, [columns, rows]. */
struct copy {
    int64_t at, nbytes;       /* in the file: whole elements */
    int64_t from;             /* in the source: where they begin, or where the matrix does */
    int64_t start;            /* the first of these bytes in the matrix as it is meant */
    int64_t rows, columns;    /* of that matrix; no rows where the bytes are as they lie */
    int64_t width;            /* bytes of an element: 1, 2, 4 or 8 in a matrix */
    int64_t first, differing; /* told: the first byte of the first element that differs, and how many do */
};

#define NEAR 4096 /* bytes between two pieces that are sooner read than left out */

static inline int64_t least_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Return whether all of `count` bytes of the open `file` could be read from `offset`. */
static int read_whole(int file, char *bytes, int64_t count, int64_t offset) {
    for (int64_t done = 0, now; done < count; done += now) {
        now = pread(file, bytes + done, (size_t)(count - done), offset + done);
        if (now <= 0) {
            return 0;
        }
    }
    return 1;
}

/* Note that the element at `byte` differs. */
static void differs(struct copy *copy, int64_t byte) {
    copy->first = copy->differing++ ? least_of(copy->first, byte) : byte;
}

/* Compare with elements that lie in the same order. */
static void compare_lines(struct copy *copy, const char *stored, const char *source, int64_t begin, int64_t count) {
    if (memcmp(stored, source, (size_t)count) == 0) {
        return;
    }
    for (int64_t at = 0; at < count; at += copy->width) {
        if (memcmp(stored + at, source + at, (size_t)least_of(copy->width, count - at))) {
            differs(copy, begin + at);
        }
    }
}

/* Compare with `count` rows of one column of the matrix, which lie one after the other in `source`: the element of the
 * first is at `stored`, the copy's byte `begin`, and each next one a whole row further on. */
#define COMPARE_COLUMN(TYPE)                                                                                           \
    static void compare_column_##TYPE(struct copy *copy, const char *stored, const char *source, int64_t begin,        \
                                      int64_t count) {                                                                 \
        for (int64_t row = 0; row < count; row++) {                                                                    \
            const int64_t at = row * copy->columns * (int64_t)sizeof(TYPE);                                            \
            TYPE one, other;                                                                                           \
            memcpy(&one, stored + at, sizeof one);                                                                     \
            memcpy(&other, source + row * (int64_t)sizeof(TYPE), sizeof other);                                        \
            if (one != other) {                                                                                        \
                differs(copy, begin + at);                                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }
COMPARE_COLUMN(uint8_t)
COMPARE_COLUMN(uint16_t)
COMPARE_COLUMN(uint32_t)
COMPARE_COLUMN(uint64_t)

/* Compare `count` bytes of the matrix from the copy's byte `begin` on, which are in `stored`. Return whether what they are
 * compared with could be read, into `block`, which has room for as many bytes as there are of them, and more. */
static int compare_turned(struct copy *copy, const char *stored, int64_t begin, int64_t count, int source, char *block,
                          int64_t size) {
    const int64_t width = copy->width, columns = copy->columns;
    const int64_t first = (copy->start + begin) / width, last = first + count / width;
    const int64_t top = first / columns, bottom = (last - 1) / columns;
    const int is_one_row = top == bottom;
    const int64_t from = is_one_row ? first % columns : 0, to = is_one_row ? (last - 1) % columns + 1 : columns;
    /* a column of the matrix is a line of the file, of which a piece is needed */
    const int64_t line = copy->rows * width, piece = (bottom - top + 1) * width;
    const int64_t some = line - piece <= NEAR && size >= line ? size / line : 1;
    void (*compare)(struct copy *, const char *, const char *, int64_t, int64_t) =
        width == 1   ? compare_column_uint8_t
        : width == 2 ? compare_column_uint16_t
        : width == 4 ? compare_column_uint32_t
                     : compare_column_uint64_t;
    for (int64_t column = from; column < to;) {
        const int64_t lines = least_of(some, to - column);
        if (!read_whole(source, block, (lines - 1) * line + piece, copy->from + column * line + top * width)) {
            return 0;
        }
        for (int64_t at = 0; at < lines; at++, column++) {
            /* in the first and the last of the rows not all columns are asked for */
            const int64_t above = top * columns + column < first, below = bottom * columns + column >= last;
            const int64_t place = ((top + above) * columns + column - first) * width;
            compare(copy, stored + place, block + at * line + above * width, begin + place, bottom - top + 1 - above - below);
        }
    }
    return 1;
}

/* Compare copies in an open `file` with their `source`, and tell in each what differs. `room` has `most` bytes of a copy,
 * and twice as many of the source. Return how many could be read to their end. */
EXPORT int64_t lora_tool_copies(int file, int source, struct copy *copies, int64_t count, char *room, int64_t most) {
    char *const block = room + most;
    for (int64_t each = 0; each < count; each++) {
        struct copy *copy = copies + each;
        const int64_t whole = most / copy->width * copy->width;
        copy->first = copy->differing = 0;
        for (int64_t done = 0; done < copy->nbytes;) {
            const int64_t now = least_of(whole, copy->nbytes - done);
            if (!read_whole(file, room, now, copy->at + done)) {
                return each;
            }
            if (copy->rows) {
                if (!compare_turned(copy, room, done, now, source, block, 2 * most)) {
                    return each;
                }
            } else {
                if (!read_whole(source, block, now, copy->from + done)) {
                    return each;
                }
                compare_lines(copy, room, block, done, now);
            }
            done += now;
        }
    }
    return count;
}
