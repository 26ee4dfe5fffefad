/* Attention of one new token a row over the slots that this row has in sight, on one core.

   Compiled for one kind of layer: G query heads share a key-value head, keys have D numbers and values E, and they are
   bfloat16 where BFLOAT16 is defined, else float32. Products, sums and probabilities are float32.

   Keys and values of a row and head lie together, slot after slot; strides from one row or head to the next are in
   numbers. `scores` has room for G times `room` numbers. A row sees the last `window` of its slots, or all of them where
   it is 0. */

#include <stdint.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t number;

static inline float read_number(number x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline number rounded(float value) { /* to the nearest, ties to even, as torch rounds */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#else
typedef float number;

static inline float read_number(number x) { return x; }

static inline number rounded(float value) { return value; }
#endif

/* e to the x for x <= 0, in operations that compilers turn into vectors: 2 to the whole part by the exponent's bits, and
   to the rest by a polynomial, with |rest| <= 0.5 exact to 2e-7. */
static inline float exponential(float x) {
    float y = x * 1.44269504f;
    y = y < -126.0f ? -126.0f : y;
    float whole = __builtin_floorf(y + 0.5f), rest = y - whole;
    float power = 1.535336188e-4f;
    power = power * rest + 1.339887440e-3f;
    power = power * rest + 9.618437357e-3f;
    power = power * rest + 5.550332471e-2f;
    power = power * rest + 2.402264791e-1f;
    power = power * rest + 6.931472028e-1f;
    power = power * rest + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return power * scale;
}

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
