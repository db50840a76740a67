/* Runs cases of `cases.py` through the kernel without Python: under another processor's emulator, or under sanitizers,
 * for which every buffer is exactly as large as it must be. Reads the cases from standard input, and writes for each
 * whether it was flagged, one byte, and the result; where W is codes of eight bits and the result is float32, also its
 * extremes and its codes, and what one call makes of W and its deltas: scales, codes, and the numbers of some rows. Each
 * merged result is made once more from file to file, a tile of rows at a time; the program fails where that is another. */
#define _XOPEN_SOURCE 700 /* pread, pwrite and fileno */
#include <stdio.h>
#include <stdlib.h>

#include "merge.c"

enum head { LEVEL_NUMBER, SOURCE_TYPE, OUT_TYPE, ROW_COUNT, COLUMN_COUNT, TERM_COUNT, HEAD };
enum coded { KIND, TYPE, STRIDE, SCALE_ROWS, ACROSS, GROUP, TALL, ABOVE, CODED };
#define OF_CODES 16 /* instead of the type of W */
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

static float *room_for(int64_t count) { return memory_of((size_t)count * sizeof(float)); }

/* Return the factor that comes next, packed in panels of `width`, and its depth; at `apart` those of each `together` rows
 * packed by themselves. */
static float *read_factor(int64_t width, int64_t *depth, int64_t together, float **apart) {
    int64_t n[FACTOR];
    read_into(n, sizeof n);
    size_t held = (size_t)n[HELD] * size_of((int)n[FACTOR_TYPE]);
    char *memory = memory_of(held);
    read_into(memory, held);
    float *packed = memory_of((size_t)((n[LENGTH] + width - 1) / width * width * n[DEPTH]) * sizeof *packed);
    lora_tool_pack(packed, width, memory + (size_t)n[BEGIN] * size_of((int)n[FACTOR_TYPE]), (int)n[FACTOR_TYPE], n[LENGTH],
                   n[DEPTH], n[ALONG], n[DOWN]);
    if (together) {
        const int64_t count = (n[LENGTH] + together - 1) / together, each = (together + width - 1) / width * width * n[DEPTH];
        *apart = memory_of((size_t)(count * each) * sizeof **apart);
        for (int64_t at = 0; at < count; at++) {
            const int64_t first = n[BEGIN] + at * together * n[ALONG];
            lora_tool_pack(*apart + at * each, width, memory + (size_t)first * size_of((int)n[FACTOR_TYPE]),
                           (int)n[FACTOR_TYPE], least_of(n[LENGTH] - at * together, together), n[DEPTH], n[ALONG], n[DOWN]);
        }
    }
    free(memory);
    *depth = n[DEPTH];
    return packed;
}

/* Return the codes that come next. */
static struct codes read_codes(int64_t rows) {
    int64_t n[CODED];
    double again;
    read_into(n, sizeof n);
    read_into(&again, sizeof again);
    const size_t sizes[] = {512 * sizeof(float), (size_t)(n[SCALE_ROWS] * n[ACROSS]) * sizeof(float),
                            (size_t)(rows * n[STRIDE])};
    void *parts[3];
    for (int at = 0; at < 3; at++) {
        parts[at] = memory_of(sizes[at]);
        read_into(parts[at], sizes[at]);
    }
    struct codes codes = {.bytes = parts[2], .table = parts[0], .scales = parts[1], .stride = n[STRIDE],
                          .apart = n[ACROSS], .group = n[GROUP], .tall = n[TALL], .above = n[ABOVE],
                          .again = (float)again, .kind = (int32_t)n[KIND], .type = (int32_t)n[TYPE]};
    return codes;
}

/* Write the extremes of each scale's numbers, and the numbers as codes. */
static void requantise(int level, const struct codes *codes, const float *numbers, int64_t rows, int64_t columns) {
    const int64_t scales = ((rows - 1 + codes->above) / codes->tall + 1) * codes->apart;
    float *low = memory_of((size_t)scales * sizeof *low), *high = memory_of((size_t)scales * sizeof *high);
    for (int64_t at = 0; at < scales; at++) {
        low[at] = INFINITY;
        high[at] = -INFINITY;
    }
    uint8_t *out = memory_of((size_t)(rows * columns));
    lora_tool_extremes(level, codes, numbers, rows, columns, low, high);
    lora_tool_quantise(level, codes, out, numbers, rows, columns, 1, -128.0f);
    fwrite(low, sizeof *low, (size_t)scales, stdout);
    fwrite(high, sizeof *high, (size_t)scales, stdout);
    fwrite(out, 1, (size_t)(rows * columns), stdout);
    free(low);
    free(high);
    free(out);
}

/* Return how many rows are computed together where they are stored as codes again. */
static int64_t rows_together(int level, const struct codes *codes, int64_t rows) {
    return codes->tall == 1 ? lora_tool_rows(level) : least_of(codes->tall, rows);
}

/* Do what `stored_again` does from the first row of the left factors on. Return as `lora_tool_merge`. */
static int requantised(int level, const struct codes *codes, const struct storing *to, uint8_t *out, int64_t rows,
                       int64_t columns, const struct term *terms, int64_t count) {
    const struct words *words = words_of(level);
    if (!words || !can_be_stored(codes, count)) {
        return -1;
    }
    mode_type before = ieee_mode();
    uint32_t largest = stored_again(words, codes, to, out, rows, columns, 0, terms, count);
    restore_mode(before);
    return largest >= too_large[F32];
}

/* Write the scales, the codes and the numbers of the first two rows that one call makes. */
static void store_again(int level, const struct codes *codes, int64_t rows, int64_t columns, const struct term *terms,
                        int64_t count) {
    const int64_t wide = lora_tool_columns(level), together = rows_together(level, codes, rows);
    int64_t panel = wide;
    while (panel % codes->group) {
        panel += wide;
    }
    panel = least_of(panel, columns);
    const int64_t scales = ((rows - 1) / codes->tall + 1) * codes->apart, kept = least_of(2, rows);
    struct storing to = {.raised = room_for(scales),
                         .scratch = room_for(together * panel),
                         .meant = room_for(kept * columns),
                         .kept = kept,
                         .panel = panel,
                         .least = codes->kind == E4M3 ? -448.0f : codes->stride % 2 ? -128.0f : -127.0f,
                         .most = codes->kind == E4M3 ? 448.0f : 127.0f,
                         .scale_type = (int32_t)(codes->stride % 4),
                         .divided = codes->kind == E4M3 || codes->stride % 2};
    uint8_t *out = memory_of((size_t)(rows * columns));
    putchar(requantised(level, codes, &to, out, rows, columns, terms, count));
    fwrite(to.raised, sizeof(float), (size_t)scales, stdout);
    fwrite(out, 1, (size_t)(rows * columns), stdout);
    fwrite(to.meant, sizeof(float), (size_t)(kept * columns), stdout);
    free(to.raised);
    free(to.scratch);
    free(to.meant);
    free(out);
}

static FILE *file_of(const void *data, size_t count) {
    FILE *file = tmpfile();
    if (!file || fwrite(data, 1, count, file) != count || fflush(file)) {
        exit(4);
    }
    return file;
}

/* Merge the rows from file to file, and compare what is written with `made`. One that is not finite ends the call, and so
 * does the end of the file: of a second call the last byte is missing. */
static void pass(int level, const void *source, const struct codes *codes, const struct passage *sizes, const void *made,
                 int flagged, const struct term *terms, int64_t count) {
    const int64_t stored = codes ? codes->stride : sizes->columns * (int64_t)size_of(sizes->source_type);
    const int64_t bytes = sizes->columns * (int64_t)size_of(sizes->out_type), begin = 3;
    struct passage passage = *sizes;
    passage.block = least_of(lora_tool_rows(level), passage.rows);
    passage.read = memory_of((size_t)(passage.block * stored));
    passage.made = !codes && stored == bytes ? passage.read : memory_of((size_t)(passage.block * bytes));
    passage.codes = codes;
    passage.some = 17;
    FILE *from = file_of(source, (size_t)(passage.rows * stored)), *to = file_of("   ", (size_t)begin);
    passage.source = fileno(from);
    passage.out = fileno(to);
    passage.to = begin;
    uint64_t seen[3];
    if (!lora_tool_scan(level, passage.source, 0, passage.rows * stored, 1, 0xFF, seen) ||
        lora_tool_scan(level, passage.source, 1, passage.rows * stored, 1, 0xFF, seen) != !stored) {
        exit(7);
    }
    const int64_t done = lora_tool_pass(level, &passage, terms, count);
    char *found = memory_of((size_t)(done * bytes));
    if ((done < passage.rows) != (flagged != 0) || !read_whole(passage.out, found, done * bytes, begin) ||
        memcmp(found, made, (size_t)(done * bytes))) {
        exit(5);
    }
    passage.from = 1;
    if (stored && lora_tool_pass(level, &passage, terms, count) >= passage.rows) {
        exit(6);
    }
    free(found);
    free(passage.read);
    if (passage.made != passage.read) {
        free(passage.made);
    }
    fclose(from);
    fclose(to);
}

static void run(const int64_t *head) {
    int level = (int)head[LEVEL_NUMBER], source_type = (int)head[SOURCE_TYPE], out_type = (int)head[OUT_TYPE];
    int is_coded = source_type == OF_CODES;
    size_t count = (size_t)(head[ROW_COUNT] * head[COLUMN_COUNT]), terms_count = (size_t)head[TERM_COUNT];
    size_t source_bytes = is_coded ? 0 : count * size_of(source_type), out_bytes = count * size_of(out_type);
    struct codes codes = {0};
    if (is_coded) {
        codes = read_codes(head[ROW_COUNT]);
    }
    void *source = memory_of(source_bytes);
    read_into(source, source_bytes);
    void *out = source_bytes == out_bytes ? source : memory_of(out_bytes), *before = memory_of(source_bytes);
    memcpy(before, source, source_bytes);
    int64_t rows = head[ROW_COUNT], columns = head[COLUMN_COUNT];
    const int is_stored_again = is_coded && codes.kind != HALVES && out_type == F32 && terms_count && codes.group > 1;
    struct term *terms = memory_of(2 * terms_count * sizeof *terms), *apart = terms + terms_count;
    for (size_t t = 0; t < terms_count; t++) {
        double scaling;
        float *left = 0;
        read_into(&scaling, sizeof scaling);
        terms[t].scaling = scaling;
        terms[t].left = read_factor(lora_tool_rows(level), &terms[t].depth,
                                    is_stored_again ? rows_together(level, &codes, rows) : 0, &left);
        terms[t].right = read_factor(lora_tool_columns(level), &terms[t].depth, 0, 0);
        apart[t] = terms[t];
        apart[t].left = left;
    }
    int flagged;
    if (is_coded) {
        flagged = lora_tool_merge_codes(level, &codes, out, out_type, rows, columns, terms, (int64_t)terms_count);
    } else if (terms_count) {
        flagged = lora_tool_merge(level, source, source_type, out, out_type, rows, columns, terms, (int64_t)terms_count);
    } else {
        flagged = lora_tool_convert(level, source, source_type, out, out_type, (int64_t)count);
    }
    putchar(flagged);
    fwrite(out, 1, out_bytes, stdout);
    const struct passage sizes = {.rows = rows, .columns = columns, .source_type = source_type, .out_type = out_type};
    pass(level, is_coded ? codes.bytes : before, is_coded ? &codes : 0, &sizes, out, flagged, terms, (int64_t)terms_count);
    free(before);
    if (is_coded && codes.kind != HALVES && out_type == F32) {
        requantise(level, &codes, out, rows, columns);
    }
    if (is_stored_again) {
        codes.above = 0;
        store_again(level, &codes, rows, columns, apart, (int64_t)terms_count);
    }
    for (size_t t = 0; t < terms_count; t++) {
        free((void *)apart[t].left);
        free((void *)terms[t].left);
        free((void *)terms[t].right);
    }
    free(terms);
    if (is_coded) {
        free((void *)codes.bytes);
        free((void *)codes.table);
        free((void *)codes.scales);
    }
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
