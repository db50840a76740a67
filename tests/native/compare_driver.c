/* Compares buffers that are exactly as large as they must be, of every type and of sizes around those of a part, and
 * copies in a file, of every width, plain and transposed: for the compiler's sanitizers. Prints how many values it found
 * beyond the bound, and how many differ. */
#include "compare.c" /* first: it says what the system is to declare */

#include <stdio.h>
#include <stdlib.h>

static const size_t size_of[TYPES] = {2, 2, 4, 8};

/* Return how many elements of a file of random bytes differ from others of it; -1 where it could not be read. */
static int64_t differing(void) {
    enum { BYTES = 1 << 14 };
    static const int64_t shapes[][2] = {{0, 0}, {1, 1}, {1, 9}, {9, 1}, {5, 7}, {64, 3}, {3, 64}, {40, 41}};
    FILE *file = tmpfile();
    for (uint32_t at = 0, state = 7; at < BYTES; at++) {
        state = 1664525u * state + 1013904223u;
        fputc((int)(state >> 24), file);
    }
    fflush(file);
    int64_t found = 0;
    for (size_t shape = 0; shape < sizeof shapes / sizeof *shapes; shape++) {
        for (int64_t width = 1; width <= 8; width *= 2) {
            const int64_t rows = shapes[shape][0], columns = shapes[shape][1], count = rows ? rows * columns : 77;
            for (int64_t most = 8; most <= 512; most *= 4) {
                struct copy copies[] = {
                    {.at = 0, .nbytes = count * width, .from = 1, .rows = rows, .columns = columns, .width = width},
                    {.at = 3, .nbytes = count / 2 * width, .from = 0, .rows = rows, .columns = columns, .width = width,
                     .start = rows ? count / 3 * width : 0},
                };
                char *room = malloc((size_t)(3 * most));
                if (lora_tool_copies(fileno(file), fileno(file), copies, 2, room, most) != 2) {
                    return -1;
                }
                free(room);
                found += copies[0].differing + copies[1].differing;
            }
        }
    }
    fclose(file);
    return found;
}

int main(void) {
    static const int64_t sizes[] = {0, 1, 3, 7, 8, 9, 15, 17, 1023, 1024, 1025, 1031, 2048, 2500};
    int64_t outside = 0;
    uint32_t state = 1;
    for (size_t which = 0; which < sizeof sizes / sizeof *sizes; which++) {
        for (int types = 0; types < TYPES * TYPES * TYPES; types++) {
            const int some[3] = {types % TYPES, types / TYPES % TYPES, types / TYPES / TYPES};
            void *data[3];
            for (int each = 0; each < 3; each++) {
                size_t bytes = size_of[some[each]] * (size_t)sizes[which];
                data[each] = malloc(bytes ? bytes : 1);
                for (size_t at = 0; at < bytes; at++) {
                    state = 1664525u * state + 1013904223u;
                    ((unsigned char *)data[each])[at] = (unsigned char)(state >> 24); /* NaN and infinity among them */
                }
            }
            struct seen seen;
            if (lora_tool_compare((const void *const *)data, some, sizes[which], 1.0, &seen)) {
                return 2;
            }
            outside += seen.outside;
            for (int each = 0; each < 3; each++) {
                free(data[each]);
            }
        }
    }
    const int64_t others = differing();
    if (others < 0) {
        return 3;
    }
    printf("%lld\n%lld\n", (long long)outside, (long long)others);
    return 0;
}
