/* Products of a few rows with weights that lie as panels (see panels.h), one after the other. The outputs that the last
   one has too much are zeros. */

#include <stdlib.h>

#include "panels.h"

#define STRETCH 512 /* inputs that are added up before they join the total: rounding grows with the longest sum */

typedef struct {
    const float *x;
    const number *weights, *bias;
    number *out;
    int64_t inputs, outputs;
} task;

static inline __attribute__((always_inline)) void multiply(const int rows, const task *of, int64_t row, int64_t panel) {
    lanes totals[MOST][VECTORS];
    const float *x = of->x + row * (of->inputs / STEP);
    const number *weights = of->weights + panel * PANEL * of->inputs;
    clear(rows, totals);
    for (int64_t i = 0; i < of->inputs; i += STRETCH) {
        lanes sums[MOST][VECTORS];
        clear(rows, sums);
        add_products(rows, x + i / STEP * rows, weights + i * PANEL, of->inputs - i < STRETCH ? of->inputs - i : STRETCH, sums);
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < VECTORS; v++) totals[m][v] += sums[m][v];
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < VECTORS; v++) {
            int64_t first = panel * PANEL + v * LANES, count = of->outputs - first < LANES ? of->outputs - first : LANES;
            number *out = of->out + (row + m) * of->outputs + first;
            for (int64_t l = 0; l < count; l++)
                out[l] = rounded(totals[m][v][l] + (of->bias ? read_number(of->bias[first + l]) : 0));
        }
}

/* The number of rows that go together from this one on: all parts are as large, or one row larger than the others. */
static int64_t together(int64_t row, int64_t rows) {
    int64_t parts = (rows - row + MOST - 1) / MOST;
    return (rows - row + parts - 1) / parts;
}

/* out [rows, outputs] of x [rows, inputs]; bias [outputs] or NULL. */
void product(const number *x, const number *weights, const number *bias, number *out, int64_t rows, int64_t inputs,
             int64_t outputs, int threads) {
    float *turned = malloc(rows * inputs / STEP * sizeof *turned);
    for (int64_t row = 0, count; row < rows; row += count) {
        const number *each[MOST];
        count = together(row, rows);
        for (int64_t m = 0; m < count; m++) each[m] = x + (row + m) * inputs;
        side_by_side(each, count, inputs, turned + row * (inputs / STEP));
    }
    task of = {turned, weights, bias, out, inputs, outputs};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < (outputs + PANEL - 1) / PANEL; panel++)
        for (int64_t row = 0, count; row < rows; row += count) {
            count = together(row, rows);
#define MULTIPLY(count) multiply(count, &of, row, panel)
            OF_ROWS(count, MULTIPLY)
        }
    free(turned);
}

/* Numbers that weights of so many inputs and outputs take. */
int64_t room(int64_t inputs, int64_t outputs) { return (outputs + PANEL - 1) / PANEL * PANEL * inputs; }

/* Whether `product` reads weights of so many inputs. */
int reads(int64_t inputs) { return inputs % STEP == 0; }

void pack(const number *weights, number *out, int64_t inputs, int64_t outputs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < (outputs + PANEL - 1) / PANEL; panel++)
        for (int64_t l = 0; l < PANEL; l++)
            for (int64_t i = 0, n = panel * PANEL + l; i < inputs; i++)
                out[(panel * inputs + i / STEP * STEP) * PANEL + l * STEP + i % STEP] =
                    n < outputs ? weights[n * inputs + i] : 0;
}
