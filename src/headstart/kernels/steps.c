/* Run the products and attention of a forward, which are functions of other sources, in order. */

#include <stdint.h>

/* `product` of prepacked.c. */
typedef int multiplier(const void *x, const void *norm, float eps, const void *weights, const void *bias, int gates,
                       const void *added, void *out, int64_t rows, int64_t inputs, int64_t outputs, int threads);

/* `attend_qkv` of cpu_attention.c. */
typedef int attender(void *qkv, const void *query_norm, const void *key_norm, float eps, const void *cos,
                     const void *sin, void *keys, const int64_t *key_strides, void *values, const int64_t *value_strides,
                     const void *mask, const int64_t *mask_strides, const int64_t *slots, void *out, int64_t rows,
                     int64_t heads, int64_t groups, int64_t tokens, int64_t size, int64_t first, int64_t window,
                     float scaling, int threads);

/* A product, or attention if there are heads. A tensor is an index, first into `tensors`, then into `scratch`, or -1 for
   NULL. `keys` and `values` are (store, index in the store). */
typedef struct {
    int64_t x, out, added, cos, sin;
    const void *norm, *key_norm, *weights, *bias;
    int64_t inputs, outputs, gates, heads, groups, size, keys[2], values[2], sliding;
    float eps, scaling;
} step;

/* Keys or values of several layers: bytes per layer, and strides of rows and heads in elements. */
typedef struct {
    char *start;
    int64_t layer, strides[2];
} store;

/* Slots that tokens see: a mask from slot `first` on, or without a mask the last `window` slots, or all if 0. */
typedef struct {
    const void *mask;
    int64_t strides[2], first, window;
} visible_range;

/* `visible`: for layers without and with a sliding window. `starts`: offset of each tensor in `scratch`, in bytes per
   token. */
typedef struct {
    char *const *tensors, *scratch;
    const int64_t *starts, *slots;
    const store *stores;
    visible_range visible[2];
    int64_t count, rows, tokens;
    multiplier *multiply;
    attender *attend;
    int threads;
} forward;

static char *at(const forward *of, int64_t tensor) {
    if (tensor < of->count) return tensor < 0 ? 0 : of->tensors[tensor];
    return of->scratch + of->rows * of->tokens * of->starts[tensor - of->count];
}

/* Run steps in order up to the first nonzero status. */
int run_steps(const step *steps, int64_t count, const forward *of) {
    int status = 0;
    for (const step *s = steps; s < steps + count && !status; s++)
        if (s->heads) {
            const store *keys = of->stores + s->keys[0], *values = of->stores + s->values[0];
            const visible_range *seen = of->visible + s->sliding;
            status = of->attend(
                at(of, s->x), s->norm, s->key_norm, s->eps, at(of, s->cos), at(of, s->sin),
                keys->start + s->keys[1] * keys->layer, keys->strides, values->start + s->values[1] * values->layer,
                values->strides, seen->mask, seen->strides, of->slots, at(of, s->out), of->rows, s->heads, s->groups,
                of->tokens, s->size, seen->first, seen->window, s->scaling, of->threads);
        } else
            status = of->multiply(at(of, s->x), s->norm, s->eps, s->weights, s->bias, (int)s->gates, at(of, s->added),
                                  at(of, s->out), of->rows * of->tokens, s->inputs, s->outputs, of->threads);
    return status;
}
