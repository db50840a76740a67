/* Codes with their scales as numbers, and numbers as codes: plain loops, which the compiler makes vectors of, once for
 * each level. `tile.h` includes them; `merge.c` says what `struct codes` holds.
 *
 *     number = (what the code stands for·scale)·again        each product rounded to float32
 *     code   = number / scale, or number·scale, rounded to float32; then cut off at the least and the largest code, and
 *              rounded to the nearest, ties to even
 */
TARGET static void NAME(numbers_of_e4m3)(float *restrict out, const uint8_t *restrict codes, float scale, float again,
                                         int64_t count) {
    const VECTOR s = SET(scale), more = SET(again);
    for (; count >= LANES; count -= LANES, codes += LANES, out += LANES) {
        STORE(out, MUL(MUL(WIDEN_e4m3(codes), s), more));
    }
    for (int64_t at = 0; at < count; at++) {
        out[at] = from_e4m3(codes[at]) * scale * again;
    }
}

TARGET static void NAME(numbers_of_int8)(float *restrict out, const uint8_t *restrict codes, float scale, float again,
                                         int64_t count) {
    for (int64_t at = 0; at < count; at++) {
        out[at] = (float)(int8_t)codes[at] * scale * again;
    }
}

TARGET static void NAME(numbers_of_halves)(float *restrict out, const uint8_t *restrict codes, float scale, float again,
                                           int64_t count, const float *restrict table) {
    _Pragma("GCC unroll 8") for (int64_t at = 0; at < count / 2; at++) {
        const float *two = table + 2 * codes[at];
        out[2 * at] = two[0] * scale * again;
        out[2 * at + 1] = two[1] * scale * again;
    }
    if (count & 1) {
        out[count - 1] = table[2 * codes[count / 2]] * scale * again;
    }
}

TARGET static void NAME(columns_scaled)(float *restrict out, const float *restrict scales, float again, int64_t count) {
    for (int64_t at = 0; at < count; at++) {
        out[at] = out[at] * scales[at] * again;
    }
}

/* Write `count` numbers of a row from a column. */
TARGET static void NAME(numbers)(float *out, const struct codes *codes, int64_t row, int64_t column, int64_t count) {
    const uint8_t *bytes = codes->bytes + row * codes->stride;
    const float *scale = scales_at(codes, row) + column / codes->group;
    if (codes->group == 1 && codes->kind != HALVES) { /* times 1 is exact */
        (codes->kind == E4M3 ? NAME(numbers_of_e4m3) : NAME(numbers_of_int8))(out, bytes + column, 1.0f, 1.0f, count);
        NAME(columns_scaled)(out, scale, codes->again, count);
        return;
    }
    int64_t left = codes->group - column % codes->group;
    for (const int64_t end = column + count; column < end; scale++, left = codes->group) {
        const int64_t some = left < end - column ? left : end - column;
        switch (codes->kind) {
        case E4M3:
            NAME(numbers_of_e4m3)(out, bytes + column, *scale, codes->again, some);
            break;
        case INT8:
            NAME(numbers_of_int8)(out, bytes + column, *scale, codes->again, some);
            break;
        default:
            NAME(numbers_of_halves)(out, bytes + column / 2, *scale, codes->again, some, codes->table);
        }
        column += some;
        out += some;
    }
}

/* Lower `low` to the least of the numbers, and raise `high` to the largest: `count` of each row, which lie `apart`. */
TARGET static void NAME(extremes)(const float *restrict numbers, int64_t apart, int64_t rows, int64_t count, float *low,
                                  float *high) {
    float least[2 * LANES], most[2 * LANES];
    VECTOR below[2] = {SET(*low), SET(*low)}, above[2] = {SET(*high), SET(*high)};
    for (; rows > 0; rows--, numbers += apart) {
        const float *row = numbers;
        int64_t left = count;
        for (; left >= 2 * LANES; left -= 2 * LANES, row += 2 * LANES) {
            UNROLLED for (int at = 0; at < 2; at++) {
                VECTOR some = LOAD(row + at * LANES);
                below[at] = LEAST(some, below[at]);
                above[at] = MOST(some, above[at]);
            }
        }
        for (int at = 0; at < (int)left; at++) {
            *low = row[at] < *low ? row[at] : *low;
            *high = row[at] > *high ? row[at] : *high;
        }
    }
    for (int at = 0; at < 2; at++) {
        STORE(least + at * LANES, below[at]);
        STORE(most + at * LANES, above[at]);
    }
    for (int at = 0; at < 2 * LANES; at++) {
        *low = least[at] < *low ? least[at] : *low;
        *high = most[at] > *high ? most[at] : *high;
    }
}

TARGET static void NAME(column_extremes)(const float *restrict numbers, int64_t count, float *restrict low,
                                         float *restrict high) {
    for (int64_t at = 0; at < count; at++) {
        low[at] = numbers[at] < low[at] ? numbers[at] : low[at];
        high[at] = numbers[at] > high[at] ? numbers[at] : high[at];
    }
}

TARGET static void NAME(ratios)(float *restrict out, const float *restrict numbers, const float *restrict scales,
                                int64_t count, int divided) {
    for (int64_t at = 0; at < count; at++) {
        out[at] = divided ? numbers[at] / scales[at] : numbers[at] * scales[at];
    }
}

#define CUT_OFF(value, least, most) ((value) > (most) ? (most) : (value) < (least) ? (least) : (value))

/* Rows of `count` numbers, which lie `apart`, as codes, `stride` bytes apart. */
TARGET static void NAME(e4m3_of)(uint8_t *restrict out, int64_t stride, const float *restrict numbers, int64_t apart,
                                 int64_t rows, int64_t count, float scale) {
    const float inverse = 1.0f / scale;
    /* The quotient, without a division (Markstein 1990): with the inverse rounded to nearest, its product with a number is
     * off by less than two ulps, the remainder is nearly exact, and both together round as number / scale does, -0 too.
     * Tried with every scale between two powers of two and all numbers near the ties of codes. 449 is rounded as 448. */
    const int usual = scale > 0x1p-60f && scale < 0x1p60f;
    const VECTOR s = SET(scale), up = SET(inverse), down = SET(-inverse), most = SET(449 * scale), least = SET(-449 * scale);
    for (; rows > 0; rows--, numbers += apart, out += stride) {
        int64_t at = 0;
        for (; usual && at <= count - LANES; at += LANES) {
            const VECTOR number = MOST(LEAST(LOAD(numbers + at), most), least), near = MUL(number, up);
            NARROW_e4m3(out + at, FMA(FMS(near, s, number), down, near));
        }
        for (; at < count; at++) {
            const float ratio = numbers[at] / scale;
            out[at] = to_e4m3(CUT_OFF(ratio, -448.0f, 448.0f));
        }
    }
}

TARGET static void NAME(int8_of)(uint8_t *restrict out, const float *restrict numbers, float scale, int64_t count,
                                 int divided, float least) {
    for (int64_t at = 0; at < count; at++) {
        const float ratio = divided ? numbers[at] / scale : numbers[at] * scale, value = CUT_OFF(ratio, least, 127.0f);
        /* 1.5·2^23 leaves an integer in the last bits, rounded to nearest even */
        out[at] = (uint8_t)bits_of(value + 0x1.8p23f);
    }
}
