/* How far stored elements, BF16 or F16, are from base + change: one pass where numpy takes a dozen. Nothing here computes
 * for the writer, which reads elements with other words. Each operation is rounded to float32, in one order at any level. */
TARGET static inline void NAME(widened)(eight_floats *out, const uint16_t *stored, int type) {
    eight_halves read;
    memcpy(&read, stored, sizeof read);
    const eight_words bits = __builtin_convertvector(read, eight_words), size = bits & 0x7FFF;
    /* a product moves the exponent of float16, and makes normal numbers of subnormal ones; infinity stays what it is */
    const eight_words moved = (eight_words)((eight_floats)(size << 13) * 0x1p112f) | ((size > 0x7BFF) & 0x7F800000);
    *out = (eight_floats)(type == BF16 ? bits << 16 : moved | (bits & 0x8000) << 16);
}

TARGET static float NAME(compare)(const uint16_t *stored, const uint16_t *base, const int *types, const double *change,
                                  int64_t count, double *totals) {
    const int type = types[0], base_type = types[1];
    const float unit = type == BF16 ? 0x1p-8f : 0x1p-11f, lowest = type == BF16 ? 0x1p-134f : 0x1p-25f;
    eight_floats sums[4] = {{0}}, least = sums[0] + lowest, value, from;
    eight_words largest = {0};
    for (int64_t at = 0; at < count; at += 8) {
        eight_doubles added;
        memcpy(&added, change + at, sizeof added);
        NAME(widened)(&value, stored + at, type);
        NAME(widened)(&from, base + at, base_type);
        const eight_floats by = __builtin_convertvector(added, eight_floats), moved = value - from, error = moved - by;
        const eight_words power = (eight_words)((eight_floats)((eight_words)value & 0x7F800000) * unit);
        const eight_words normal = power > (eight_words)least, half = (power & normal) | ((eight_words)least & ~normal);
        const eight_words ratio = (eight_words)(error / (eight_floats)half) & INT32_MAX, more = ratio > largest;
        largest = (ratio & more) | (largest & ~more); /* the bits of NaN are larger than all others */
        sums[0] += error * error, sums[1] += by * by, sums[2] += moved * moved, sums[3] += moved * by;
    }
    int32_t most = 0;
    for (int lane = 0; lane < 8; lane++) {
        for (int sum = 0; sum < 4; sum++) {
            totals[sum] += (double)sums[sum][lane];
        }
        most = largest[lane] > most ? largest[lane] : most;
    }
    return float_of((uint32_t)most);
}
