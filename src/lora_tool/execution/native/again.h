/* Results that are small beside the rounding errors of their sum, because W and delta nearly cancel: summed again.
 *
 * Element (i, j) of a delta is a chain of products b[k]·a[k], each of which is rounded depth - k times while it is added up,
 * and then once with its scaling, which is itself rounded, and once for each further term. So it is off by at most
 *
 *     2^-24 · sum over k of (depth - k + 2)·|b[k]·a[k]|·|s| ≤ 2^-24 · |s|·reach(b)·reach(a)
 *
 * with reach(x) = sqrt(sum over k of (depth - k + 2)·x[k]^2), by Cauchy and Schwarz; the sum with W adds half a unit in the
 * last place of float32. A type with d digits has neighbours that are at least 2^-d·|out| apart, also just below a power of
 * two. Where the error is less than that, `out` is one of the two neighbours of the exact sum. */
#define SLACK 1.01f /* for errors of errors, and for what this arithmetic rounds itself */
#define EXTRA 2     /* rows of a panel behind its factor, for what it reaches */

/* What a sum of |s|·reach(b)·reach(a) over terms is multiplied with to give the size from which results need no doubt. */
static float doubt_of(int digits, int64_t count) {
    return digits ? ldexpf(SLACK, digits - 24) * (float)(count + 2) / 3 : 0; /* no product is rounded less than three times */
}

/* Write the reach of each lane behind a panel, and then the largest. */
static void write_reaches(float *panel, int64_t width, int64_t depth) {
    float *reaches = panel + width * depth, largest = 0;
    for (int64_t lane = 0; lane < width; lane++) {
        double sum = 0;
        for (int64_t k = 0; k < depth; k++) {
            const double value = panel[k * width + lane];
            sum += (double)(depth - k + 2) * value * value;
        }
        reaches[lane] = (float)sqrt(sum);
        largest = reaches[lane] > largest ? reaches[lane] : largest;
        reaches[width + lane] = 0;
    }
    reaches[width] = largest;
}

/* A tile: rows and columns of W + delta, where its parts are and where its results go. */
struct spot {
    const float *tile;
    int rows, columns;
    const void *source;
    void *out;
    int64_t apart, stride;
    int type, out_type;
    int64_t left, right; /* the rows of the packed factors that its first row and column have */
};

/* Add a number to a sum, and what rounding cut off to its `rest`. */
static inline void added(double *sum, double *rest, double number) {
    const double before = *sum, after = before + number, back = after - before;
    *rest += (before - (after - back)) + (number - back);
    *sum = after;
}

/* Return W + deltas as if summed with twice the digits of float64, in which a product of two floats is exact. (Ogita, Rump,
 * Oishi, "Accurate sum and dot product", SIAM Journal on Scientific Computing 26, 2005) */
static double exact_sum(const struct words *words, const struct spot *spot, float weight, int row, int column,
                        const struct term *terms, int64_t count) {
    double sum = weight, rest = 0;
    for (int64_t t = 0; t < count; t++) {
        const int64_t depth = terms[t].depth;
        const float *left = terms[t].left + spot->left * (depth + EXTRA) + row;
        const float *right = terms[t].right + spot->right * (depth + EXTRA) + column;
        const double scaling = terms[t].scaling;
        double chain = 0, cut = 0;
        for (int64_t k = 0; k < depth; k++, left += words->rows, right += words->columns) {
            added(&chain, &cut, (double)*left * *right);
        }
        const double scaled = scaling * chain;
        rest += fma(scaling, chain, -scaled) + scaling * cut;
        added(&sum, &rest, scaled);
    }
    return sum + rest;
}

/* Return what |s|·reach(b)·reach(a) of an element are together. */
static float reach_at(const struct words *words, const struct spot *spot, int row, int column, const struct term *terms,
                      int64_t count) {
    float sum = 0;
    for (int64_t t = 0; t < count; t++) {
        const int64_t depth = terms[t].depth;
        sum += fabsf((float)terms[t].scaling) * terms[t].left[spot->left * (depth + EXTRA) + depth * words->rows + row] *
               terms[t].right[spot->right * (depth + EXTRA) + depth * words->columns + column];
    }
    return sum;
}

/* Return whether one of a row's results is smaller than a positive number: in integers, which the compiler makes vectors
 * of. */
static int is_near(const float *weights, const float *tile, int columns, float number) {
    const int32_t limit = (int32_t)bits_of(number);
    int32_t near = 0;
    for (int column = 0; column < columns; column++) {
        near |= (int32_t)(bits_of(weights[column] + tile[column]) & 0x7FFFFFFFu) < limit;
    }
    return near;
}

/* Write results once more that are smaller than `sure` times their reach, of which none is more than `most`. Which they are
 * does not depend on the tile. */
static void summed_again(const struct words *words, const struct spot *spot, float sure, float most, const struct term *terms,
                         int64_t count) {
    for (int row = 0; row < spot->rows; row++) {
        float weights[TILE_MOST / ROWS_MOST];
        const float *tile = spot->tile + row * words->columns;
        const char *source = (const char *)spot->source + (size_t)(row * spot->apart) * size_of(spot->type);
        words->convert[spot->type][F32](source, weights, spot->columns);
        if (!is_near(weights, tile, spot->columns, sure * most)) {
            continue;
        }
        for (int column = 0; column < spot->columns; column++) {
            const float size = fabsf(weights[column] + tile[column]);
            if (size < sure * most && size < sure * reach_at(words, spot, row, column, terms, count)) {
                const float total = (float)exact_sum(words, spot, weights[column], row, column, terms, count);
                char *out = (char *)spot->out + (size_t)(row * spot->stride + column) * size_of(spot->out_type);
                words->convert[F32][spot->out_type](&total, out, 1);
            }
        }
    }
}
