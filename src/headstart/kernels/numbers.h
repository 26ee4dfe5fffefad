/* `number`: a tensor element, bfloat16 if BFLOAT16 is defined, else float32. Sums are float32 in either case. */

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

/* exp(x) for x <= 0, vectorisable: 2 ** whole by exponent bits, times 2 ** rest by a polynomial, exact to 2e-7 for
   |rest| <= 0.5. */
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

static inline float silu(float x) {
    float e = exponential(x < 0 ? x : -x);
    return (x < 0 ? x * e : x) / (1 + e);
}

/* x * silu(by). */
static inline number gated(number by, number x) {
    return rounded(read_number(rounded(silu(read_number(by)))) * read_number(x));
}

/* RMS norm, rounded before the weight is applied; out may be x. */
static inline void norm_row(const number *x, const number *weight, number *out, int64_t size, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += read_number(x[i]) * read_number(x[i]);
    float scale = 1 / __builtin_sqrtf(sum / size + eps);
    for (int64_t i = 0; i < size; i++)
        out[i] = rounded(read_number(weight[i]) * read_number(rounded(read_number(x[i]) * scale)));
}
