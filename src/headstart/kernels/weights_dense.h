/* Unquantised weights and rows, multiplied by `panels.h`. Floats that bfloat16 represents exactly, as in most published
   models, are stored as their upper halves: half the memory traffic, equal results. */

#define STRETCH 512 /* inputs per partial sum: rounding errors grow with the length of a sum */

static inline int64_t bytes_of_panel(int64_t inputs, int storage) { return PANEL * inputs * size_of_weight(storage); }

/* Floats of a row in the layout of `add_up`. */
static inline int64_t floats_of_row(int64_t inputs) { return inputs / STEP; }

static inline void read_rows(const number *const *rows, int64_t count, int64_t inputs, float *out) {
    side_by_side(rows, count, inputs, out);
}

static inline __attribute__((always_inline)) void add_up(const int rows, const int storage, const float *x,
                                                         const void *panel, int64_t inputs, ahead next,
                                                         lanes totals[MOST][VECTORS]) {
    const char *weights = panel;
    clear(rows, totals);
    for (int64_t i = 0; i < inputs; i += STRETCH) {
        lanes sums[MOST][VECTORS];
        clear(rows, sums);
        int64_t count = inputs - i < STRETCH ? inputs - i : STRETCH;
        add_products(rows, storage, x + i / STEP * rows, weights + bytes_of_panel(i, storage), count, next, sums);
        next.from += count / STEP * next.each;
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < VECTORS; v++) totals[m][v] += sums[m][v];
    }
}

/* Whether products support this number of inputs. */
int reads(int64_t inputs) { return inputs % STEP == 0; }

static inline uint32_t bits_of(number x) {
    float value = read_number(x);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#define BLOCK 4096 /* weights checked without a branch */

/* FULL or HALVES. */
int best_storage(const number *weights, int64_t count, int threads) {
    if (sizeof(number) == 2) return FULL;
    uint32_t lower = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : lower)
    for (int64_t start = 0; start < count; start += BLOCK)
        if (!lower) {
            int64_t stop = count - start < BLOCK ? count : start + BLOCK;
            uint32_t of_block = 0;
            for (int64_t i = start; i < stop; i++) of_block |= bits_of(weights[i]);
            lower = of_block & 0xffff;
        }
    return lower ? FULL : HALVES;
}

/* Pack weights [count, inputs] into a zero-padded panel. */
static void pack_panel(const number *weights, int64_t count, int64_t inputs, int storage, void *panel) {
    uint16_t *halves = panel;
    number *whole = panel;
    for (int64_t l = 0; l < PANEL; l++)
        for (int64_t i = 0; i < inputs; i++) {
            int64_t at = i / STEP * STEP * PANEL + l * STEP + i % STEP;
            number weight = l < count ? weights[l * inputs + i] : 0;
            if (storage == HALVES) halves[at] = bits_of(weight) >> 16;
            else whole[at] = weight;
        }
}

/* Convert a panel from HALVES to FULL. */
static void widen_panel(const void *panel, int64_t inputs, number *out) {
    const uint16_t *halves = panel;
    for (int64_t i = 0; i < inputs * VECTORS; i++, halves += LANES, out += LANES) {
        lanes x = of_halves(halves);
        if (sizeof(number) == sizeof(float)) memcpy(out, &x, sizeof x);
    }
}
