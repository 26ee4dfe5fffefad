/* Elementwise operators between products, over contiguous rows. Rounds where torch rounds. */

#include "numbers.h"

#define WORTH_THREADS 30000 /* numbers */

void norm(const number *x, const number *weight, number *out, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > WORTH_THREADS)
    for (int64_t m = 0; m < rows; m++) norm_row(x + m * size, weight, out + m * size, size, eps);
}

/* out [rows, size] = silu(first half of both) * second half; both [rows, 2 * size]. */
void gate(const number *both, number *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > WORTH_THREADS)
    for (int64_t m = 0; m < rows; m++) {
        const number *restrict of = both + 2 * m * size;
        number *restrict to = out + m * size;
        for (int64_t i = 0; i < size; i++) to[i] = gated(of[i], of[size + i]);
    }
}
