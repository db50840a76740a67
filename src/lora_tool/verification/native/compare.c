/* How far stored values are from what they should be, compiled: one pass where numpy takes a dozen. And columns of a
 * matrix in a file, which are a call of the system for each row.
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
#define VERSION 2 /* of the functions below; native/library.py asks for it */

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

/* Read `bytes` bytes from `offset` of the open `file`, and as many every `apart` bytes after it, `rows` times, one after
 * the other into `out`. Return how many rows could be read to their end. */
EXPORT int64_t lora_tool_columns(int file, int64_t offset, int64_t apart, int64_t rows, int64_t bytes, char *out) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t done = 0, now; done < bytes; done += now) {
            now = pread(file, out + row * bytes + done, (size_t)(bytes - done), offset + row * apart + done);
            if (now <= 0) {
                return row;
            }
        }
    }
    return rows;
}
