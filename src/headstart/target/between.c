/* What a forward computes between its products, of rows that lie one after the other. Rounded where torch rounds. */

#include "numbers.h"

void norm(const number *x, const number *weight, number *out, int64_t rows, int64_t size, float eps) {
    for (; rows--; x += size, out += size) norm_row(x, weight, out, size, eps);
}

/* out [rows, size]: the second half of both [rows, 2 * size] gated by silu of the first. */
void gate(const number *restrict both, number *restrict out, int64_t rows, int64_t size) {
    for (; rows--; both += 2 * size, out += size)
        for (int64_t i = 0; i < size; i++)
            out[i] = rounded(read_number(rounded(silu(read_number(both[i])))) * read_number(both[size + i]));
}
