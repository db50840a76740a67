/* What the values of tensors are like, compiled: read and looked at a block at a time, in the cache, without Python's lock.
 *
 * Without its sign, the bits of a float are an integer that grows with its magnitude: the largest one of a tensor tells
 * whether anything in it is not zero, absurd, infinite or NaN. Nothing is computed with the values.
 */
#define _XOPEN_SOURCE 700    /* pread, */
#define _FILE_OFFSET_BITS 64 /* also beyond 2 GB where a long has 32 bits */
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "lora-tool's scan works on the little-endian bytes of the files"
#endif

#define EXPORT __attribute__((visibility("default")))
#define VERSION 2 /* of the functions below; native/library.py asks for it */

/* Elements that lie in one piece in a file, and what is seen of them. */
struct piece {
    int64_t offset, bytes;
    int64_t width;      /* bytes of an element: 1 of what has no float type */
    uint64_t magnitude; /* the bits that are not the sign, in bytes without a sign all of them */
    uint64_t first;     /* the bits of the first element */
    uint64_t largest;   /* the largest magnitude's bits */
    uint64_t differing; /* the bits in which any element differs from the first */
};

/* The loops are over signed integers, whose larger one every vector unit tells: magnitudes have no sign. */
#define LOOK(TARGET, LEVEL, BITS, SIGNED)                                                                              \
    TARGET static void LEVEL##_##BITS(const void *block, int64_t count, struct piece *piece) {                         \
        const BITS *values = block, first = (BITS)piece->first, mask = (BITS)piece->magnitude;                         \
        SIGNED largest = 0;                                                                                            \
        BITS differing = 0;                                                                                            \
        for (int64_t at = 0; at < count; at++) {                                                                       \
            SIGNED magnitude = (SIGNED)(values[at] & mask);                                                            \
            largest = magnitude > largest ? magnitude : largest;                                                       \
            differing |= values[at] ^ first;                                                                           \
        }                                                                                                              \
        piece->largest = (uint64_t)largest > piece->largest ? (uint64_t)largest : piece->largest;                      \
        piece->differing |= differing;                                                                                 \
    }

#define ALL(TARGET, LEVEL)                                                                                             \
    LOOK(TARGET, LEVEL, uint8_t, int16_t)                                                                              \
    LOOK(TARGET, LEVEL, uint16_t, int16_t)                                                                             \
    LOOK(TARGET, LEVEL, uint32_t, int32_t)                                                                             \
    LOOK(TARGET, LEVEL, uint64_t, int64_t)

ALL(, plain)
#if defined(__x86_64__)
ALL(__attribute__((target("avx2"))), avx2)
#define BEST(BITS) (__builtin_cpu_supports("avx2") ? avx2_##BITS : plain_##BITS)
#else
#define BEST(BITS) plain_##BITS
#endif

/* Return whether all of `bytes` of the open `file` could be read from `offset`. */
static int read_whole(int file, char *block, int64_t bytes, int64_t offset) {
    for (int64_t done = 0, now; done < bytes; done += now) {
        now = pread(file, block + done, (size_t)(bytes - done), offset + done);
        if (now <= 0) {
            return 0;
        }
    }
    return 1;
}

EXPORT int lora_tool_scan_version(void) { return VERSION; }

/* Look at pieces of the open `file`; `block` is memory of `size` bytes, a multiple of 8, where they are read, some at a
 * time. Return how many were looked at before the system refused, or one has no whole number of elements. */
EXPORT int64_t lora_tool_scan(int file, struct piece *pieces, int64_t count, void *block, int64_t size) {
    for (int64_t at = 0; at < count; at++) {
        struct piece *piece = &pieces[at];
        if ((piece->width != 1 && piece->width != 2 && piece->width != 4 && piece->width != 8) ||
            piece->bytes % piece->width) {
            return at;
        }
        piece->first = piece->largest = piece->differing = 0;
        for (int64_t done = 0; done < piece->bytes; done += size) {
            const int64_t some = piece->bytes - done < size ? piece->bytes - done : size;
            if (!read_whole(file, block, some, piece->offset + done)) {
                return at;
            }
            if (!done) {
                memcpy(&piece->first, block, (size_t)piece->width);
            }
            (piece->width == 1   ? BEST(uint8_t)
             : piece->width == 2 ? BEST(uint16_t)
             : piece->width == 4 ? BEST(uint32_t)
                                 : BEST(uint64_t))(block, some / piece->width, piece);
        }
    }
    return count;
}
