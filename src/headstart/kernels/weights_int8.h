/* Weights in 8 bits with a scale per output, and activations with a scale per STRETCH of inputs, so that an outlier affects
   only its group. Instructions multiply four at once, with unsigned weights. Without VNNI, AVX2 adds two products in 16
   bits; to avoid overflow, activations then have one bit less, and shorter groups. */

#define FOUR 4      /* interleaved inputs */
#define HIGHEST 127 /* of a weight */
#define MIDDLE 128  /* zero point of unsigned weights */

#if LANES == 16 && defined(__AVX512VNNI__)
#define READ(from) _mm512_loadu_si512(from)
#define ADD_FOURS(sums, weights, x) _mm512_dpbusd_epi32(sums, weights, x)
#elif LANES == 8 && defined(__AVX2__)
#define READ(from) _mm256_loadu_si256((const __m256i *)(from))
#ifdef __AVXVNNI__
#define ADD_FOURS(sums, weights, x) _mm256_dpbusd_avx_epi32(sums, weights, x)
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define ADD_FOURS(sums, weights, x) _mm256_dpbusd_epi32(sums, weights, x)
#else
#define IN_16_BITS
#define ADD_FOURS(sums, weights, x) add_fours(sums, weights, x)
#endif
#endif

#ifdef IN_16_BITS
#define STRETCH 16
#define HIGHEST_OF_ROW 64 /* two of them times weights up to 255 are less than 32768 */

static inline __m256i add_fours(__m256i sums, __m256i weights, __m256i x) {
    __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(1));
    /* Serialise the additions: products in flight would take registers from the sums. */
    __asm__ volatile("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));
    return sums;
}
#else
#define STRETCH 128
#define HIGHEST_OF_ROW 127
#endif

/* A panel: the scale of each output, then its weights, with four inputs of each output interleaved. */
static inline int64_t bytes_of_panel(int64_t inputs, int storage) { return PANEL * (sizeof(float) + inputs); }

/* Per group, a row has its scale, initial sum (zero-point correction) and inputs; rows of a product are interleaved. */
static inline int64_t floats_of_row(int64_t inputs) { return 2 * ((inputs + STRETCH - 1) / STRETCH) + inputs / FOUR; }

#ifdef ADD_FOURS

int reads(int64_t inputs) { return inputs % FOUR == 0; }

/* Bits of the largest magnitude; bits of NaN are the largest. */
static inline uint32_t bits_of_largest(const float *x, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

/* Quantise to integers up to `highest` and return the scale, NaN if any number is not finite. */
static inline __attribute__((always_inline)) float round_numbers(const float *x, int64_t count, int highest, int8_t *out) {
    uint32_t bits = bits_of_largest(x, count);
    float most, factor;
    memcpy(&most, &bits, sizeof most);
    factor = bits < 0x7f800000 && most > 1e-30f ? highest / most : 0;
    for (int64_t i = 0; i < count; i++) out[i] = factor ? (int8_t)(int32_t)__builtin_rintf(x[i] * factor) : 0;
    return bits < 0x7f800000 ? most / highest : __builtin_nanf("");
}

static inline void read_rows(const number *const *rows, int64_t count, int64_t inputs, float *out) {
    for (int64_t i = 0; i < inputs; i += STRETCH) {
        int64_t width = inputs - i < STRETCH ? inputs - i : STRETCH;
        for (int64_t m = 0; m < count; m++) {
            float x[STRETCH];
            int8_t rounded_x[STRETCH];
            int32_t sum = 0;
            for (int64_t k = 0; k < width; k++) x[k] = read_number(rows[m][i + k]);
            out[m] = round_numbers(x, width, HIGHEST_OF_ROW, rounded_x);
            for (int64_t k = 0; k < width; k++) sum += rounded_x[k];
            sum *= -MIDDLE;
            memcpy(out + count + m, &sum, sizeof sum);
            for (int64_t k = 0; k < width; k += FOUR) memcpy(out + 2 * count + k / FOUR * count + m, rounded_x + k, FOUR);
        }
        out += (2 + width / FOUR) * count;
    }
}

static inline int32_t four(const float *x) {
    int32_t bits;
    memcpy(&bits, x, sizeof bits);
    return bits;
}

static inline __attribute__((always_inline)) void add_up(const int rows, const int storage, const float *x,
                                                         const void *panel, int64_t inputs, ahead next,
                                                         lanes totals[MOST][VECTORS]) {
    const char *weights = (const char *)panel + PANEL * sizeof(float);
    clear(rows, totals);
    for (int64_t i = 0; i < inputs; i += STRETCH) {
        ints sums[MOST][VECTORS];
        const float *steps = x;
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < VECTORS; v++) sums[m][v] = BROADCAST(four(x + rows + m));
        x += 2 * rows;
        for (int64_t k = i; k < inputs && k < i + STRETCH; k += FOUR, weights += FOUR * PANEL, x += rows) {
            ints read[VECTORS];
            for (int v = 0; v < VECTORS; v++) read[v] = READ(weights + v * FOUR * LANES);
            for (int m = 0; m < rows; m++) {
                ints of_row = BROADCAST(four(x + m));
                for (int v = 0; v < VECTORS; v++) sums[m][v] = ADD_FOURS(sums[m][v], read[v], of_row);
            }
        }
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < VECTORS; v++) totals[m][v] += (lanes)AS_FLOATS(sums[m][v]) * steps[m];
    }
    for (int v = 0; v < VECTORS; v++) {
        lanes steps;
        memcpy(&steps, (const float *)panel + v * LANES, sizeof steps);
        for (int m = 0; m < rows; m++) totals[m][v] *= steps;
    }
}

static void pack_panel(const number *weights, int64_t count, int64_t inputs, int storage, void *panel) {
    uint8_t *out = (uint8_t *)panel + PANEL * sizeof(float);
    for (int64_t l = 0; l < PANEL; l++) {
        float x[inputs], *step = (float *)panel + l;
        int8_t rounded_x[inputs];
        for (int64_t i = 0; i < inputs; i++) x[i] = l < count ? read_number(weights[l * inputs + i]) : 0;
        *step = round_numbers(x, inputs, HIGHEST, rounded_x);
        for (int64_t i = 0; i < inputs; i++) out[(i / FOUR * PANEL + l) * FOUR + i % FOUR] = rounded_x[i] + MIDDLE;
    }
}

#else /* there are none */

int reads(int64_t inputs) { return 0; }
static inline void read_rows(const number *const *rows, int64_t count, int64_t inputs, float *out) {}
static inline void add_up(const int rows, const int storage, const float *x, const void *panel, int64_t inputs, ahead next,
                          lanes totals[MOST][VECTORS]) {}
static void pack_panel(const number *weights, int64_t count, int64_t inputs, int storage, void *panel) {}

#endif

int best_storage(const number *weights, int64_t count, int threads) { return FULL; }
static void widen_panel(const void *panel, int64_t inputs, number *out) {}
