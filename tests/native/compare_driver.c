/* Compares buffers that are exactly as large as they must be, of every type and of sizes around those of a part: for
 * the compiler's sanitizers. Prints how many values it found beyond the bound. */
#include "compare.c" /* first: it says what the system is to declare */

#include <stdio.h>
#include <stdlib.h>

static const size_t size_of[TYPES] = {2, 2, 4, 8};

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
    printf("%lld\n", (long long)outside);
    return 0;
}
