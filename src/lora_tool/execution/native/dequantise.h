/* Quantised weights as numbers: what a byte stands for is looked up, and multiplied with the scale of its group.
 *
 *     out[r][c] = (table[code]·scale)·again        each product rounded to float32
 *
 * A byte is one code, or two: then it has two numbers in the table, one after the other. Row r has a scale for each
 * `group` columns, an even number of them where a byte is two codes and there are several. Its codes begin at
 * codes[r·codes_stride], its scales at scales[r·scales_stride]. */
static void numbers_of_bytes(float *restrict out, const uint8_t *restrict codes, const float *restrict table,
                             float scale, float again, int64_t count) {
    _Pragma("GCC unroll 8") for (int64_t at = 0; at < count; at++) { out[at] = table[codes[at]] * scale * again; }
}

static void numbers_of_halves(float *restrict out, const uint8_t *restrict codes, const float *restrict table,
                              float scale, float again, int64_t count) {
    _Pragma("GCC unroll 8") for (int64_t at = 0; at < count / 2; at++) {
        const float *two = table + 2 * codes[at];
        out[2 * at] = two[0] * scale * again;
        out[2 * at + 1] = two[1] * scale * again;
    }
    if (count & 1) {
        out[count - 1] = table[2 * codes[count / 2]] * scale * again;
    }
}

EXPORT void lora_tool_dequantise(float *out, const uint8_t *codes, const float *table, int in_halves,
                                 const float *scales, float again, int64_t rows, int64_t columns, int64_t group,
                                 int64_t codes_stride, int64_t scales_stride) {
    mode_type before = ieee_mode();
    for (int64_t row = 0; row < rows; row++, out += columns, codes += codes_stride, scales += scales_stride) {
        for (int64_t first = 0, at = 0; first < columns; first += group, at++) {
            const int64_t count = columns - first < group ? columns - first : group;
            if (in_halves) {
                numbers_of_halves(out + first, codes + first / 2, table, scales[at], again, count);
            } else {
                numbers_of_bytes(out + first, codes + first, table, scales[at], again, count);
            }
        }
    }
    restore_mode(before);
}
