/* Products of a few rows with weights in consecutive, zero-padded panels (see panels.h). */

#include "panels.h"
#if defined(TILES) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && STEP == 2 && !defined(EIGHT_BITS)
#include "weights_tiles.h"
#else
#define IN_TILES 0
#define TOGETHER MOST /* rows multiplied together */
#define OF_GROUP OF_ROWS
#define AHEAD 1024    /* prefetch distance in bytes if weights are read once */
#define FEW 12        /* up to here, every thread lays out all rows: faster than fetching them from another core */

static inline void begin(int64_t rows) {}
static inline void end(void) {}

#ifdef EIGHT_BITS
#include "weights_int8.h"
#else
#include "weights_dense.h"
#endif
#endif

int in_tiles(void) { return IN_TILES; }

#define HEADER LINE /* bytes before the first panel; the first byte is FULL or HALVES */

typedef struct {
    const char *panels;
    const number *bias;
    int64_t inputs, outputs, bytes; /* of a panel */
    int storage;
} matrix;

/* Memory to prefetch while a group of rows is multiplied with a panel. If there are several groups, the panel is cached,
   and each prefetches a part of the next one; except tiles, which saturate cache bandwidth. */
static inline ahead to_prefetch(const char *panel, const matrix *of, int64_t group, int64_t groups) {
    if (groups > 1 && IN_TILES) return (ahead){panel, 0};
    int64_t from = groups > 1 ? of->bytes + of->bytes * group / groups : AHEAD;
    return (ahead){panel + from, of->bytes / (of->inputs / STEP) / groups};
}

/* Multiply rows, in the layout of `read_rows`, by a panel; `widened_panel` is the panel converted to FULL, or NULL. */
static inline __attribute__((always_inline)) void multiply(const int rows, const matrix *of, const float *x, int64_t panel,
                                                           const number *widened_panel, int64_t group, int64_t groups,
                                                           number *out, int64_t stride) {
    const char *weights = of->panels + panel * of->bytes;
    ahead next = to_prefetch(weights, of, group, groups);
    lanes totals[TOGETHER][VECTORS];
    if (of->storage == HALVES && !widened_panel) add_up(rows, HALVES, x, weights, of->inputs, next, totals);
    else add_up(rows, FULL, x, widened_panel ? (const void *)widened_panel : weights, of->inputs, next, totals);
    for (int v = 0; v < VECTORS; v++) {
        int64_t first = panel * PANEL + v * LANES, count = of->outputs - first;
        lanes bias = {0};
        for (int64_t l = 0; of->bias && l < LANES && l < count; l++) bias[l] = read_number(of->bias[first + l]);
        for (int m = 0; m < rows; m++) {
            number *to = out + m * stride + v * LANES;
            lanes total = totals[m][v];
            IN_REGISTER(total); /* no fused multiply-add with the bias */
            total += bias;
            if (count >= LANES) write_rounded(total, to);
            else
                for (int64_t l = 0; l < count; l++) to[l] = rounded(total[l]);
        }
    }
}

/* Lay out rows for `multiply`, after a norm (or NULL); returns 0 without memory. */
static int lay_out(const number *x, const number *norm, float eps, int64_t rows, int64_t inputs, float *out) {
    const number *each[TOGETHER];
    int64_t bytes = rows * inputs * sizeof(number);
    number *normed = norm ? thread_scratch(0, bytes) : NULL;
    if (norm && !normed) return 0;
    for (int64_t m = 0; m < rows; m++) {
        each[m] = norm ? normed + m * inputs : x + m * inputs;
        if (norm) norm_row(x + m * inputs, norm, normed + m * inputs, inputs, eps);
    }
    read_rows(each, rows, inputs, out);
    if (norm) release(normed, bytes);
    return 1;
}

/* out [rows, outputs] = x [rows, inputs] times weights, plus bias [outputs] or NULL. Applies an RMS norm [inputs] before, if
   not NULL. After, gates the second half by silu of the first, out [rows, outputs / 2], or adds `added` [rows, outputs], if
   not NULL. Rounds where torch rounds. Returns 0 or NO_MEMORY. */
int product(const number *x, const number *norm, float eps, const void *weights, const number *bias, int gates,
             const number *added, number *out, int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    if (!rows) return 0;
    int storage = *(const char *)weights;
    matrix of = {(const char *)weights + HEADER, bias, inputs, outputs, bytes_of_panel(inputs, storage), storage};
    int64_t groups = (rows + TOGETHER - 1) / TOGETHER, width = gates ? outputs / 2 : outputs, step = floats_of_row(inputs);
    int widens = storage == HALVES && groups > 1; /* convert once for all groups */
    int64_t bytes = rows * step * sizeof(float);
    float *of_all = rows > FEW ? thread_scratch(1, bytes) : NULL;
    int complete = 1;
#define START(group) (rows * (group) / groups)
#define LAY_OUT(group)                                                                                                 \
    complete &= lay_out(x + START(group) * inputs, norm, eps, START(group + 1) - START(group), inputs,                 \
                        read + START(group) * step);
#pragma omp parallel num_threads(threads) reduction(& : complete)
    {
        float *read = of_all ? of_all : thread_scratch(1, bytes);
        int64_t widened_bytes = (1 + gates) * PANEL * inputs * sizeof(number);
        number *widened_panel = widens ? thread_scratch(2, widened_bytes) : NULL;
        complete = read && (widened_panel || !widens);
        if (of_all) {
#pragma omp for schedule(static)
            for (int64_t group = 0; group < groups; group++) LAY_OUT(group)
        } else
            for (int64_t group = 0; group < groups && complete; group++) LAY_OUT(group)
        begin((rows + groups - 1) / groups);
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < (width + PANEL - 1) / PANEL; panel++) {
            if (!complete) continue;
            for (int side = 0; side <= gates && widens; side++)
                widen_panel(of.panels + (panel + side * width / PANEL) * of.bytes, inputs, widened_panel + side * PANEL * inputs);
            for (int64_t group = 0; group < groups; group++) {
                int64_t row = START(group), count = START(group + 1) - row;
                int64_t columns = width - panel * PANEL < PANEL ? width - panel * PANEL : PANEL;
                const float *from = read + row * step;
                number *to = out + row * width + panel * PANEL, sides[2][TOGETHER * PANEL];
                for (int side = 0; side <= gates; side++) {
                    number *part = gates ? sides[side] : to;
                    int64_t stride = gates ? PANEL : width, at = panel + side * width / PANEL;
                    const number *whole = widens ? widened_panel + side * PANEL * inputs : NULL;
#define MULTIPLY(count) multiply(count, &of, from, at, whole, group, groups, part, stride)
                    OF_GROUP(count, MULTIPLY)
                }
                for (int64_t m = 0; m < count && gates; m++)
                    for (int64_t l = 0; l < PANEL; l++)
                        to[m * width + l] = gated(sides[0][m * PANEL + l], sides[1][m * PANEL + l]);
                for (int64_t m = 0; m < count && added; m++)
                    for (int64_t l = 0; l < columns; l++) {
                        number *sum = to + m * width + l;
                        *sum = rounded(read_number(added[(row + m) * width + panel * PANEL + l]) + read_number(*sum));
                    }
            }
        }
        end();
        if (widens) release(widened_panel, widened_bytes);
        if (!of_all) release(read, bytes);
    }
    if (of_all) release(of_all, bytes);
    return complete ? 0 : NO_MEMORY;
}

/* Bytes of packed weights. */
int64_t packed_bytes(int64_t inputs, int64_t outputs, int storage) {
    return HEADER + (outputs + PANEL - 1) / PANEL * bytes_of_panel(inputs, storage);
}

/* Whether `product` supports gating this many outputs. */
int can_gate(int64_t outputs) { return outputs % (2 * PANEL) == 0; }

/* Pack weights [outputs, inputs]; `storage` comes from `best_storage`. */
void pack(const number *weights, char *out, int64_t inputs, int64_t outputs, int storage, int threads) {
    int64_t bytes = bytes_of_panel(inputs, storage);
    memset(out, 0, HEADER);
    *out = (char)storage;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < (outputs + PANEL - 1) / PANEL; panel++)
        pack_panel(weights + panel * PANEL * inputs, outputs - panel * PANEL, inputs, storage, out + HEADER + panel * bytes);
}
