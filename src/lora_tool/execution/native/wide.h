/* Factors in float64, for each level: their products, each a chain in the order of k, and rounding what comes of them
 * once. `tile.h` includes it; `merge.c` says what the words of a level mean.
 */
#define WIDE_COLUMNS (PANEL * PANELS)
#define EACH (PANEL / WIDE_LANES) /* vectors of a panel */

_Static_assert(PANEL * WIDE_COLUMNS <= WIDE_MOST, "the tile of doubles is larger than its memory");

/* tile = tile + left·right, every element a chain of fma over k. Left is a panel, right PANELS of them, `apart` numbers from
 * one to the next. */
TARGET static void NAME(wide_product)(double *tile, const double *left, const double *right, int64_t depth,
                                      int64_t apart) {
    WIDE chain[PANEL][PANELS * EACH];
    UNROLLED for (int r = 0; r < PANEL; r++) {
        UNROLLED for (int v = 0; v < PANELS * EACH; v++) {
            chain[r][v] = WIDE_LOAD(tile + r * WIDE_COLUMNS + v * WIDE_LANES);
        }
    }
    for (int64_t k = 0; k < depth; k++, left += PANEL, right += PANEL) {
        WIDE a[PANELS * EACH];
        UNROLLED for (int v = 0; v < PANELS * EACH; v++) {
            a[v] = WIDE_LOAD(right + v / EACH * apart + v % EACH * WIDE_LANES);
        }
        UNROLLED for (int r = 0; r < PANEL; r++) {
            WIDE b = WIDE_SET(left[r]);
            UNROLLED for (int v = 0; v < PANELS * EACH; v++) { chain[r][v] = WIDE_FMA(b, a[v], chain[r][v]); }
        }
    }
    UNROLLED for (int r = 0; r < PANEL; r++) {
        UNROLLED for (int v = 0; v < PANELS * EACH; v++) {
            WIDE_STORE(tile + r * WIDE_COLUMNS + v * WIDE_LANES, chain[r][v]);
        }
    }
}

/* out = scale·values, in float64; of a row every `step`-th value is taken */
#define SCALED(type, stored_type, widened)                                                                             \
    TARGET static void NAME(scaled_##type)(double *restrict out, const void *restrict values, int64_t step,            \
                                           double scale, int64_t count) {                                              \
        const stored_type *stored = values;                                                                            \
        if (step == 1) {                                                                                               \
            for (int64_t at = 0; at < count; at++) {                                                                   \
                out[at] = scale * (double)widened(stored[at]);                                                         \
            }                                                                                                          \
        } else {                                                                                                       \
            for (int64_t at = 0; at < count; at++) {                                                                   \
                out[at] = scale * (double)widened(stored[at * step]);                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }

/* panels[lane / PANEL][k][lane % PANEL] = values[lane·along + k·down] in float64; panels are `apart` numbers apart. Where lanes
 * lie side by side, their number is a multiple of PANEL, else it is at most PANEL. */
#define PACKED(type, stored_type, widened)                                                                             \
    TARGET static void NAME(packed_##type)(double *restrict panels, int64_t apart, const void *restrict values,        \
                                           int64_t along, int64_t down, int64_t lanes, int64_t depth) {                \
        const stored_type *stored = values;                                                                            \
        if (along == 1 && lanes % PANEL == 0) {                                                                        \
            for (int64_t k = 0; k < depth; k++, stored += down) {                                                      \
                for (int64_t first = 0; first < lanes; first += PANEL) {                                               \
                    double *panel = panels + first / PANEL * apart + k * PANEL;                                        \
                    UNROLLED for (int lane = 0; lane < PANEL; lane++) {                                                \
                        panel[lane] = (double)widened(stored[first + lane]);                                           \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t from = 0; from < depth; from += ABREAST, stored += ABREAST * down) {                              \
            double lines[PANEL][ABREAST];                                                                              \
            const int64_t some = least_of(ABREAST, depth - from);                                                      \
            for (int64_t lane = 0; lane < lanes; lane++) {                                                             \
                NAME(scaled_##type)(lines[lane], stored + lane * along, down, 1.0, some);                              \
            }                                                                                                          \
            for (int64_t k = 0; k < some; k++) {                                                                       \
                for (int64_t lane = 0; lane < lanes; lane++) {                                                         \
                    panels[(from + k) * PANEL + lane] = lines[lane][k];                                                \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

#define READ(type, stored_type, widened)                                                                               \
    SCALED(type, stored_type, widened)                                                                                 \
    PACKED(type, stored_type, widened)

READ(bf16, uint16_t, from_bf16)
READ(f16, uint16_t, from_f16)
READ(f32, float, )
READ(f64, double, )
#undef READ

/* Round float64 to odd: its last bit stands for all that is cut off, so that rounding to 16 bits rounds once. */
static inline float NAME(odd)(double value) {
    const float near = (float)value;
    const uint32_t bits = bits_of(near), finite = (bits & 0x7F800000u) != 0x7F800000u;
    const double back = (double)near;
    const uint32_t inexact = finite & (back != value), beyond = (back < 0 ? -back : back) > (value < 0 ? -value : value);
    return float_of((bits - (inexact & beyond)) | inexact);
}

/* Return the largest |result|, as LARGEST gives it; of float64 whether one is not finite, as a number that is too large. */
TARGET static uint32_t NAME(rounded)(const double *restrict values, void *restrict to, int type, int64_t apart,
                                     int64_t count) {
    uint32_t largest = 0;
    switch (type) {
    case BF16:
    case F16:
        for (int64_t at = 0; at < count; at++) {
            const float value = NAME(odd)(values[at]);
            const uint32_t size = bits_of(value) << 1;
            largest = size > largest ? size : largest;
            ((uint16_t *)to)[at * apart] = type == BF16 ? to_bf16(value) : to_f16(value);
        }
        break;
    case F32:
        if (apart == 1) {
            float *write = to;
            for (int64_t at = 0; at < count; at++) {
                const float value = (float)values[at];
                const uint32_t size = bits_of(value) << 1;
                largest = size > largest ? size : largest;
                write[at] = value;
            }
        } else {
            for (int64_t at = 0; at < count; at++) {
                const float value = (float)values[at];
                const uint32_t size = bits_of(value) << 1;
                largest = size > largest ? size : largest;
                ((float *)to)[at * apart] = value;
            }
        }
        break;
    default:
        for (int64_t at = 0; at < count; at++) {
            const double value = values[at];
            largest = value - value == 0.0 ? largest : UINT32_MAX;
            ((double *)to)[at * apart] = value;
        }
    }
    return largest;
}
