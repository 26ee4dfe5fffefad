/* Attention of one new token a row over the slots that this row has in sight, on one core.

   Compiled for one kind of layer: G query heads share a key-value head, keys have D numbers and values E, and they are
   bfloat16 where BFLOAT16 is defined, else float32. Products, sums and probabilities are float32.

   Keys and values of a row and head lie together, slot after slot; strides from one row or head to the next are in
   numbers. `scores` has room for G times `room` numbers. A row sees the last `window` of its slots, or all of them where
   it is 0. */

#include "numbers.h"

void attend(const number *queries, const number *keys, const number *values, const int64_t *slots, number *out,
            int64_t rows, int64_t heads, int64_t key_row_stride, int64_t key_head_stride, int64_t value_row_stride,
            int64_t value_head_stride, int64_t window, float scaling, float *scores, int64_t room) {
    for (int64_t at = 0; at < rows * heads; at++) {
        int64_t row = at / heads, head = at % heads, stop = slots[row];
        int64_t start = window && stop > window ? stop - window : 0, seen = stop - start;
        const number *key = keys + row * key_row_stride + head * key_head_stride + start * D;
        const number *value = values + row * value_row_stride + head * value_head_stride + start * E;

        float query[G][D], most[G], total[G], mixed[G][E];
        for (int g = 0; g < G; g++)
            for (int d = 0; d < D; d++) query[g][d] = read_number(queries[(at * G + g) * D + d]) * scaling;
        for (int g = 0; g < G; g++) most[g] = -__builtin_inff();
        for (int64_t s = 0; s < seen; s++) {
            float of_slot[D];
            for (int d = 0; d < D; d++) of_slot[d] = read_number(key[s * D + d]);
            for (int g = 0; g < G; g++) {
                float sum = 0;
                for (int d = 0; d < D; d++) sum += of_slot[d] * query[g][d];
                scores[g * room + s] = sum;
                most[g] = sum > most[g] ? sum : most[g];
            }
        }

        for (int g = 0; g < G; g++) {
            float *score = scores + g * room, sum = 0;
            for (int64_t s = 0; s < seen; s++) {
                score[s] = exponential(score[s] - most[g]);
                sum += score[s];
            }
            total[g] = sum;
        }

        memset(mixed, 0, sizeof mixed);
        for (int64_t s = 0; s < seen; s++) {
            float of_slot[E];
            for (int e = 0; e < E; e++) of_slot[e] = read_number(value[s * E + e]);
            for (int g = 0; g < G; g++)
                for (int e = 0; e < E; e++) mixed[g][e] += scores[g * room + s] * of_slot[e];
        }
        for (int g = 0; g < G; g++)
            for (int e = 0; e < E; e++) out[(at * G + g) * E + e] = rounded(mixed[g][e] / total[g]);
    }
}
