/* Runs cases of `cases.py` through the kernel without Python: under another processor's emulator, or under sanitizers,
 * for which every buffer is exactly as large as it must be. Reads the cases from standard input, and writes for each
 * whether it was flagged, one byte, and the result. */
#include <stdio.h>
#include <stdlib.h>

#include "merge.c"

enum head { LEVEL_NUMBER, SOURCE_TYPE, OUT_TYPE, ROW_COUNT, COLUMN_COUNT, TERM_COUNT, HEAD };
enum factor { FACTOR_TYPE, HELD, BEGIN, LENGTH, DEPTH, ALONG, DOWN, FACTOR };

static void *memory_of(size_t count) {
    void *data = malloc(count ? count : 1);
    if (!data) {
        exit(2);
    }
    return data;
}

static void read_into(void *data, size_t count) {
    if (fread(data, 1, count, stdin) != count) {
        exit(3);
    }
}

static size_t size_of(int64_t type) { return type == F32 ? 4 : 2; }

/* Return the factor that comes next, packed in panels of `width`, and its depth. */
static float *read_factor(int64_t width, int64_t *depth) {
    int64_t n[FACTOR];
    read_into(n, sizeof n);
    size_t held = (size_t)n[HELD] * size_of(n[FACTOR_TYPE]);
    char *memory = memory_of(held);
    read_into(memory, held);
    float *packed = memory_of((size_t)((n[LENGTH] + width - 1) / width * width * n[DEPTH]) * sizeof *packed);
    lora_tool_pack(packed, width, memory + (size_t)n[BEGIN] * size_of(n[FACTOR_TYPE]), (int)n[FACTOR_TYPE], n[LENGTH],
                   n[DEPTH], n[ALONG], n[DOWN]);
    free(memory);
    *depth = n[DEPTH];
    return packed;
}

static void run(const int64_t *head) {
    int level = (int)head[LEVEL_NUMBER], source_type = (int)head[SOURCE_TYPE], out_type = (int)head[OUT_TYPE];
    size_t count = (size_t)(head[ROW_COUNT] * head[COLUMN_COUNT]), terms_count = (size_t)head[TERM_COUNT];
    size_t source_bytes = count * size_of(source_type), out_bytes = count * size_of(out_type);
    void *source = memory_of(source_bytes);
    read_into(source, source_bytes);
    void *out = source_bytes == out_bytes ? source : memory_of(out_bytes);
    struct term *terms = memory_of(terms_count * sizeof *terms);
    for (size_t t = 0; t < terms_count; t++) {
        double scaling;
        read_into(&scaling, sizeof scaling);
        terms[t].scaling = (float)scaling;
        terms[t].left = read_factor(lora_tool_rows(level), &terms[t].depth);
        terms[t].right = read_factor(lora_tool_columns(level), &terms[t].depth);
    }
    int flagged = terms_count ? lora_tool_merge(level, source, source_type, out, out_type, head[ROW_COUNT],
                                                head[COLUMN_COUNT], terms, (int64_t)terms_count)
                              : lora_tool_convert(level, source, source_type, out, out_type, (int64_t)count);
    putchar(flagged);
    fwrite(out, 1, out_bytes, stdout);
    for (size_t t = 0; t < terms_count; t++) {
        free((void *)terms[t].left);
        free((void *)terms[t].right);
    }
    free(terms);
    if (out != source) {
        free(out);
    }
    free(source);
}

int main(void) {
    int64_t head[HEAD];
    while (fread(head, sizeof *head, HEAD, stdin) == HEAD) {
        run(head);
    }
    return 0;
}
