/* Weights as they are, and rows too: one stretch of inputs after the other, as `panels.h` multiplies them. */

#define STRETCH 512 /* inputs that are added up before they join the total: rounding grows with the longest sum */

static inline int64_t bytes_of_panel(int64_t inputs) { return PANEL * inputs * sizeof(number); }

/* Floats that a row takes as `add_up` reads it. */
static inline int64_t floats_of_row(int64_t inputs) { return inputs / STEP; }

static inline void read_rows(const number *const *rows, int64_t count, int64_t inputs, float *out) {
    side_by_side(rows, count, inputs, out);
}

static inline __attribute__((always_inline)) void add_up(const int rows, const float *x, const void *panel, int64_t inputs,
                                                         ahead next, lanes totals[MOST][VECTORS]) {
    const number *weights = panel;
    clear(rows, totals);
    for (int64_t i = 0; i < inputs; i += STRETCH) {
        lanes sums[MOST][VECTORS];
        clear(rows, sums);
        int64_t count = inputs - i < STRETCH ? inputs - i : STRETCH;
        add_products(rows, x + i / STEP * rows, weights + i * PANEL, count, next, sums);
        next.from += count / STEP * next.each;
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < VECTORS; v++) totals[m][v] += sums[m][v];
    }
}

/* Whether there are products of so many inputs. */
int reads(int64_t inputs) { return inputs % STEP == 0; }

/* A panel from weights [count, inputs]; outputs after the last one are zeros. */
static void pack_panel(const number *weights, int64_t count, int64_t inputs, void *panel) {
    number *out = panel;
    for (int64_t l = 0; l < PANEL; l++)
        for (int64_t i = 0; i < inputs; i++)
            out[i / STEP * STEP * PANEL + l * STEP + i % STEP] = l < count ? weights[l * inputs + i] : 0;
}
