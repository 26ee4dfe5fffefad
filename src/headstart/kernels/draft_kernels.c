/* Kernels of draft heads for a few rows on a CPU: products with 8-bit weights, norms, attention over a cache, whole levels
   and trees, best drafts; and an argmax. Rows are contiguous unless a stride is given. */

#include <omp.h>

#include "panels.h"

/* -- products ------------------------------------------------------------------------------------------------------ */

#if LANES == 16
#define ZERO _mm512_setzero_si512()
#define WIDENED(from) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(from)))
#ifdef __AVX512VNNI__
#define ADD_PAIRS(sums, a, b) _mm512_dpwssd_epi32(sums, a, b)
#else
#define ADD_PAIRS(sums, a, b) _mm512_add_epi32(sums, _mm512_madd_epi16(a, b))
#endif
#elif defined(__AVX2__)
#define ZERO _mm256_setzero_si256()
#define WIDENED(from) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(from)))
#define ADD_PAIRS(sums, a, b) _mm256_add_epi32(sums, _mm256_madd_epi16(a, b))
#else
#error "products are written for AVX2 and AVX-512"
#endif

#define HIGHEST 32767 /* of 16-bit activations */
#define NO_TOKEN -2   /* status: the table lacks a token */
#define AHEAD 4096    /* prefetch distance in bytes */
#define STRETCH 128   /* group size: inputs of a row that share a scale */

/* Weights are in panels of PANEL outputs, with pairs of inputs interleaved. */
typedef struct {
    const int8_t *weight;
    const number *scale;
    int64_t inputs, outputs;
} map;

/* Quantise a row to 16 bits, in `pairs` of inputs, with a scale per STRETCH; both are `stride` apart. A NaN or infinity
   makes its whole group NaN. */
static void round_row(const number *x, int64_t inputs, int32_t *pairs, float *scales, int64_t stride) {
    for (int64_t start = 0; start < inputs; start += STRETCH, scales += stride) {
        int64_t stop = inputs - start < STRETCH ? inputs : start + STRETCH;
        float most = 0, none = 0;
        for (int64_t i = start; i < stop; i++) {
            float value = read_number(x[i]), size = __builtin_fabsf(value);
            most = size > most ? size : most;
            none += value * 0;
        }
        *scales = none == 0 ? most / HIGHEST : __builtin_nanf("");
        float factor = none == 0 && most > 1e-30f ? HIGHEST / most : 0;
        for (int64_t i = start; i < stop; i += 2, pairs += stride) {
            float first = factor ? read_number(x[i]) * factor : 0, second = factor ? read_number(x[i + 1]) * factor : 0;
            *pairs = ((int32_t)__builtin_rintf(first) & 0xffff) | (int32_t)__builtin_rintf(second) * 0x10000;
        }
    }
}

static inline __attribute__((always_inline)) void multiply(const int rows, const map *of, const int32_t *x,
                                                           const float *scales, int64_t panel, number *out,
                                                           int64_t width, int64_t first, int64_t stop) {
    const int8_t *weight = of->weight + panel * PANEL * of->inputs;
    lanes totals[MOST][VECTORS];
    clear(rows, totals);
    for (int64_t start = 0; start < of->inputs; start += STRETCH) {
        ints sums[MOST][VECTORS];
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < VECTORS; v++) sums[m][v] = ZERO;
        for (int64_t i = start; i < of->inputs && i < start + STRETCH; i += 2, weight += 2 * PANEL, x += rows) {
            ints read[VECTORS];
            __builtin_prefetch(weight + AHEAD);
            for (int v = 0; v < VECTORS; v++) read[v] = WIDENED(weight + v * 2 * LANES);
            for (int m = 0; m < rows; m++) {
                ints of_row = BROADCAST(x[m]);
                for (int v = 0; v < VECTORS; v++) sums[m][v] = ADD_PAIRS(sums[m][v], read[v], of_row);
            }
        }
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < VECTORS; v++) totals[m][v] += (lanes)AS_FLOATS(sums[m][v]) * scales[m];
        scales += rows;
    }
    int64_t from = first > panel * PANEL ? first : panel * PANEL;
    int64_t to = stop < (panel + 1) * PANEL ? stop : (panel + 1) * PANEL;
    for (int m = 0; m < rows; m++) {
        float of_panel[PANEL];
        memcpy(of_panel, totals[m], sizeof of_panel);
        for (int64_t n = from; n < to; n++)
            out[m * width + n - first] = rounded(of_panel[n - panel * PANEL] * read_number(of->scale[n]));
    }
}

/* out [rows, sum of counts] = x [rows, inputs] times some outputs of a map: `counts[part]` from `firsts[part]` on.
   Returns 0 or NO_MEMORY, as do other functions here. */
static int multiply_parts(const map *of, const number *x, number *out, int64_t rows, int parts, const int64_t *firsts,
                          const int64_t *counts, int threads) {
    int64_t inputs = of->inputs, panels = 0, width = 0, stretches = (inputs + STRETCH - 1) / STRETCH;
    int64_t bytes = rows * (inputs / 2 + stretches) * sizeof(int32_t);
    int32_t *pairs = thread_scratch(0, bytes);
    if (!pairs) return NO_MEMORY;
    float *scales = (float *)(pairs + rows * (inputs / 2));
    for (int64_t row = 0, count; row < rows; row += count) {
        count = rows - row < MOST ? rows - row : MOST;
        for (int64_t m = 0; m < count; m++)
            round_row(x + (row + m) * inputs, inputs, pairs + row * (inputs / 2) + m, scales + row * stretches + m, count);
    }
    for (int part = 0; part < parts; part++) {
        width += counts[part];
        if (counts[part]) panels += (firsts[part] + counts[part] - 1) / PANEL - firsts[part] / PANEL + 1;
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t index = 0; index < panels; index++) {
        int64_t rest = index, column = 0;
        int part = 0;
        for (int64_t of_part;; column += counts[part++], rest -= of_part) {
            of_part = counts[part] ? (firsts[part] + counts[part] - 1) / PANEL - firsts[part] / PANEL + 1 : 0;
            if (rest < of_part) break;
        }
        int64_t panel = firsts[part] / PANEL + rest, stop = firsts[part] + counts[part];
        for (int64_t row = 0, count; row < rows; row += count) {
            count = rows - row < MOST ? rows - row : MOST;
            const int32_t *from = pairs + row * (inputs / 2);
            const float *of_rows = scales + row * stretches;
            number *to = out + row * width + column;
#define MULTIPLY(count) multiply(count, of, from, of_rows, panel, to, width, firsts[part], stop)
            OF_ROWS(count, MULTIPLY)
        }
    }
    release(pairs, bytes);
    return 0;
}

int product(const map *of, const number *x, number *out, int64_t rows, int threads) {
    int64_t first = 0;
    return multiply_parts(of, x, out, rows, 1, &first, &of->outputs, threads);
}

int64_t outputs_of_a_panel(void) { return PANEL; }

/* -- norms --------------------------------------------------------------------------------------------------------- */

void norm(const number *x, const number *weight, number *out, int64_t rows, int64_t size, int64_t out_stride,
          float eps) {
    for (; rows--; x += size, out += out_stride) {
        float sum = 0;
        for (int64_t i = 0; i < size; i++) sum += read_number(x[i]) * read_number(x[i]);
        float scale = 1 / __builtin_sqrtf(sum / size + eps);
        for (int64_t i = 0; i < size; i++) out[i] = rounded(read_number(x[i]) * scale * read_number(weight[i]));
    }
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

#define WORTH_THREADS 200000 /* products of queries and keys */
#define QUERIES 16           /* queries per pass over the slots, unless one entry has more */

enum { ROW, SLOT, POSITION, BEFORE, FURTHER };

/* Apply rotary positions to a head, and scale it. */
static inline void rotate(const number *x, const number *cos, const number *sin, float scaling, int64_t size, float *out) {
    int64_t half = size / 2;
    for (int64_t d = 0; d < half; d++) {
        float a = read_number(x[d]), b = read_number(x[d + half]);
        out[d] = scaling * (a * read_number(cos[d]) - b * read_number(sin[d]));
        out[d + half] = scaling * (b * read_number(cos[d + half]) + a * read_number(sin[d + half]));
    }
}

static inline float dot(const number *x, const float *query, int64_t size) {
    float sum = 0;
    for (int64_t d = 0; d < size; d++) sum += read_number(x[d]) * query[d];
    return sum;
}

static inline void add(const number *x, float share, int64_t size, float *sums) {
    for (int64_t d = 0; d < size; d++) sums[d] += share * read_number(x[d]);
}

/* New entries. Outputs are computed for entry `last[row]` of each of `requested` rows with equally many entries, or for all
   entries if `last` is NULL. The fields of an entry are its row, slot, position, the number of leading slots that it sees,
   and `further` slots. Angles are [positions, size]; keys and values are contiguous per row and head. */
typedef struct {
    const number *cos, *sin;
    number *keys, *values;
    const int64_t *entries, *last;
    int64_t positions, slots, count, further, requested, heads, key_heads, size, row_stride, head_stride;
} kv_view;

static inline int64_t output_entry(const kv_view *of, int64_t index) {
    return of->last ? index * (of->count / of->requested) + of->last[index] : index;
}

static inline int64_t angle_of(const kv_view *of, const int64_t *entry) {
    return (entry[POSITION] < of->positions ? entry[POSITION] : of->positions - 1) * of->size;
}

/* Write keys and values of all entries, and attend: out [requested, heads * size]. A row of `qkv` has an entry's queries,
   keys and values. The first `own` key heads return their own value: they have no queries and keys, and no cache. */
static int attend_entries(int64_t own, const number *qkv, const kv_view *of, number *out, int threads) {
    const number *cos = of->cos, *sin = of->sin;
    number *keys = of->keys + own * of->head_stride, *values = of->values + own * of->head_stride;
    const int64_t *entries = of->entries;
    int64_t further = of->further, size = of->size, groups = of->heads / of->key_heads;
    int64_t key_heads = of->key_heads - own, heads = groups * key_heads, found = of->heads * size;
    int64_t width = (heads + 2 * key_heads + own) * size, fields = FURTHER + further;
    int64_t most_queries = groups > QUERIES ? groups : QUERIES, room = of->slots + further;
    float rotated_key[size], scaling = 1 / __builtin_sqrtf(size);
    int64_t of_scores = threads * most_queries * room * sizeof(float);
    float *all_scores = thread_scratch(1, of_scores);
    if (!all_scores) return NO_MEMORY;
    for (int64_t m = 0; m < of->count; m++) {
        const int64_t *entry = entries + m * fields;
        int64_t place = entry[ROW] * of->row_stride + entry[SLOT] * size, angle = angle_of(of, entry);
        const number *key = qkv + m * width + heads * size, *value = key + (key_heads + own) * size;
        for (int64_t n = 0; n < key_heads; n++, place += of->head_stride) {
            rotate(key + n * size, cos + angle, sin + angle, 1, size, rotated_key);
            for (int64_t d = 0; d < size; d++) keys[place + d] = rounded(rotated_key[d]);
            memcpy(values + place, value + n * size, size * sizeof(number));
        }
    }
    for (int64_t at = 0; at < of->requested; at++)
        for (int64_t h = 0; h < own * groups; h++) {
            const number *value = qkv + output_entry(of, at) * width + (heads + key_heads + h / groups) * size;
            memcpy(out + at * found + h * size, value, size * sizeof(number));
        }
    out += own * groups * size;
    for (int64_t at = 0, together; at < of->requested && key_heads; at += together) {
        int64_t row = entries[output_entry(of, at) * fields + ROW], before = 0;
        for (together = 0; at + together < of->requested && (together + 1) * groups <= most_queries; together++) {
            const int64_t *entry = entries + output_entry(of, at + together) * fields;
            if (entry[ROW] != row) break;
            before = entry[BEFORE] > before ? entry[BEFORE] : before;
        }
        int64_t queries = together * groups;
        int many = key_heads * queries * before * size > WORTH_THREADS;
#pragma omp parallel for schedule(static) num_threads(threads) if (many)
        for (int64_t n = 0; n < key_heads; n++) {
            float query[queries][size], mixed[queries][size];
            float *scores = all_scores + omp_get_thread_num() * most_queries * room;
            const number *key = keys + row * of->row_stride + n * of->head_stride;
            const number *value = values + row * of->row_stride + n * of->head_stride;
            for (int64_t i = 0; i < queries; i++) {
                int64_t m = output_entry(of, at + i / groups), angle = angle_of(of, entries + m * fields);
                const number *of_query = qkv + m * width + (n * groups + i % groups) * size;
                rotate(of_query, cos + angle, sin + angle, scaling, size, query[i]);
            }
            for (int64_t s = 0; s < before; s++)
                for (int64_t i = 0; i < queries; i++) scores[i * room + s] = dot(key + s * size, query[i], size);
            for (int64_t i = 0; i < queries; i++) {
                const int64_t *entry = entries + output_entry(of, at + i / groups) * fields, *others = entry + FURTHER;
                float *score = scores + i * room, *of_others = score + before, most = -__builtin_inff(), sum = 0;
                for (int64_t s = 0; s < entry[BEFORE]; s++) most = score[s] > most ? score[s] : most;
                for (int64_t k = 0; k < further; k++) {
                    of_others[k] = dot(key + others[k] * size, query[i], size);
                    most = of_others[k] > most ? of_others[k] : most;
                }
                for (int64_t s = 0; s < before; s++) score[s] = s < entry[BEFORE] ? exponential(score[s] - most) : 0;
                for (int64_t k = 0; k < further; k++) of_others[k] = exponential(of_others[k] - most);
                for (int64_t s = 0; s < before + further; s++) sum += score[s];
                for (int64_t s = 0; s < before + further; s++) score[s] /= sum;
                memset(mixed[i], 0, sizeof mixed[i]);
                for (int64_t k = 0; k < further; k++) add(value + others[k] * size, of_others[k], size, mixed[i]);
            }
            for (int64_t s = 0; s < before; s++)
                for (int64_t i = 0; i < queries; i++) add(value + s * size, scores[i * room + s], size, mixed[i]);
            for (int64_t i = 0; i < queries; i++) {
                number *to = out + (at + i / groups) * found + (n * groups + i % groups) * size;
                for (int64_t d = 0; d < size; d++) to[d] = rounded(mixed[i][d]);
            }
        }
    }
    release(all_scores, of_scores);
    return 0;
}

int attend(const number *qkv, const kv_view *of, number *out, int threads) {
    return attend_entries(0, qkv, of, out, threads);
}

/* -- levels -------------------------------------------------------------------------------------------------------- */

/* Norms may be NULL; `gate_up` belongs to a SwiGLU MLP. The first `own` key heads attend only to their own position. */
typedef struct {
    map qkv, output, gate_up, down;
    const number *input_norm, *query_norm, *key_norm, *mlp_norm;
    int64_t own;
    float eps;
} layer_weights;

/* Run a layer: out [requested, size], from the attention input and the residual stream. Rounds where torch rounds. */
static int layer(const layer_weights *of, const number *read, const number *stream, const kv_view *at, number *out,
                 int threads) {
    int64_t inputs = of->qkv.inputs, size = of->output.outputs, inner = of->down.inputs, found = of->output.inputs;
    int64_t key_heads = at->key_heads - of->own, heads = at->heads / at->key_heads * key_heads;
    int64_t firsts[] = {(at->heads - heads) * at->size, (at->heads + of->own) * at->size};
    int64_t counts[] = {heads * at->size, (key_heads + at->key_heads) * at->size}, width = counts[0] + counts[1];
    int64_t entries = at->count, rows = at->requested;
    int64_t bytes = (entries * (inputs + width) + rows * (found + 2 * size + 3 * inner)) * sizeof *out;
    number *normed_input = thread_scratch(2, bytes);
    if (!normed_input) return NO_MEMORY;
    number *qkv = normed_input + entries * inputs, *mixed = qkv + entries * width, *middle = mixed + rows * found;
    number *normed = middle + rows * size, *both = normed + rows * size, *inside = both + 2 * rows * inner;
    if (of->input_norm) norm(read, of->input_norm, normed_input, entries, inputs, inputs, of->eps), read = normed_input;
    int status = multiply_parts(&of->qkv, read, qkv, entries, 2, firsts, counts, threads);
    if (status) goto end;
    for (int64_t m = 0; m < entries && of->query_norm; m++) {
        number *queries = qkv + m * width, *keys = queries + counts[0];
        norm(queries, of->query_norm, queries, heads, at->size, at->size, of->eps);
        norm(keys, of->key_norm, keys, key_heads, at->size, at->size, of->eps);
    }
    if ((status = attend_entries(of->own, qkv, at, mixed, threads))) goto end;
    if ((status = product(&of->output, mixed, middle, rows, threads))) goto end;
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < size; i++) {
            number *sum = middle + m * size + i;
            *sum = rounded(read_number(stream[output_entry(at, m) * size + i]) + read_number(*sum));
        }
    norm(middle, of->mlp_norm, normed, rows, size, size, of->eps);
    if ((status = product(&of->gate_up, normed, both, rows, threads))) goto end;
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < inner; i++) {
            const number *gate = both + 2 * m * inner + i;
            inside[m * inner + i] = gated(gate[0], gate[inner]);
        }
    if ((status = product(&of->down, inside, out, rows, threads))) goto end;
    for (int64_t i = 0; i < rows * size; i++) out[i] = rounded(read_number(middle[i]) + read_number(out[i]));
end:
    release(normed_input, bytes);
    return status;
}

/* Recurrent heads: layers, and a norm (or NULL) before the LM head; the feedback is taken after or before the norm. With a
   table of embeddings, the first layer reads a normed embedding and the normed feedback, concatenated; the stream starts
   from the feedback, normed or not. */
typedef struct {
    const layer_weights *layers;
    map lm_head, fusion;
    const number *norm, *table, *embedding_norm, *fed_norm;
    int64_t depth, vocabulary, feeds_normed, normed_stream;
    float eps;
} recurrent;

/* Run a level: feedback and logits of the requested entries. Inputs are `read` and `stream`, or tokens with the feedback
   `above` of their parents, by index; without parents, `above` is the fusion's input, one row per token. Returns NO_TOKEN
   for a token outside the table. */
int level(const recurrent *of, const number *read, const number *stream, const int64_t *tokens, const int64_t *parents,
          const number *above, const kv_view *at, number *feedback, number *logits, int threads) {
    int64_t size = of->lm_head.inputs, entries = at->count, rows = at[of->depth - 1].requested;
    for (int64_t m = 0; m < entries && tokens; m++)
        if (tokens[m] < 0 || tokens[m] >= of->vocabulary) return NO_TOKEN;
    int64_t bytes = (5 * entries + 2 * rows) * size * sizeof(number);
    number *both = thread_scratch(3, bytes);
    if (!both) return NO_MEMORY;
    int status = 0;
    number *first = both + 2 * entries * size, *between = first + entries * size, *last = between + entries * size;
    number *hidden = last + rows * size;
    if (tokens) {
        number *fused = hidden + rows * size;
        if (!parents) status = product(&of->fusion, above, fused, entries, threads), above = fused;
        if (status) goto end;
        for (int64_t m = 0; m < entries; m++) {
            const number *fed = above + (parents ? parents[m] : m) * size;
            number *to = both + 2 * m * size;
            norm(of->table + tokens[m] * size, of->embedding_norm, to, 1, size, size, of->eps);
            norm(fed, of->fed_norm, to + size, 1, size, size, of->eps);
            memcpy(first + m * size, of->normed_stream ? to + size : fed, size * sizeof *first);
        }
        read = both, stream = first;
    }
    for (int64_t n = 0; n < of->depth; n++) {
        number *to = n == of->depth - 1 ? last : stream == first ? between : first;
        if ((status = layer(of->layers + n, read, stream, at + n, to, threads))) goto end;
        read = stream = to;
    }
    if (of->norm) norm(last, of->norm, hidden, rows, size, size, of->eps);
    memcpy(feedback, of->norm && of->feeds_normed ? hidden : last, rows * size * sizeof *feedback);
    status = product(&of->lm_head, of->norm ? hidden : last, logits, rows, threads);
end:
    release(both, bytes);
    return status;
}

/* -- choices ------------------------------------------------------------------------------------------------------- */

/* out [3, rows, ranks]: the bits of the log-probabilities, best first, then their indices, then their tokens. */
void best_drafts(const number *logits, int64_t rows, int64_t size, int64_t ranks, const int64_t *tokens, int32_t *out) {
    for (int64_t r = 0; r < rows; r++, logits += size) {
        float top[ranks], sum = 0;
        int64_t filled = 0;
        int32_t *log_prob = out + r * ranks, *index = log_prob + rows * ranks, *token = index + rows * ranks;
        for (int64_t start = 0, stop; start < size; start = stop) {
            stop = start + 64 < size ? start + 64 : size;
            float most = -__builtin_inff();
            for (int64_t i = start; i < stop; i++) most = read_number(logits[i]) > most ? read_number(logits[i]) : most;
            if (filled == ranks && most <= top[ranks - 1]) continue;
            for (int64_t i = start; i < stop; i++) {
                float value = read_number(logits[i]);
                if (filled == ranks && value <= top[ranks - 1]) continue;
                int64_t k = filled < ranks ? filled++ : ranks - 1;
                for (; k && top[k - 1] < value; k--) top[k] = top[k - 1], index[k] = index[k - 1];
                top[k] = value, index[k] = (int32_t)i;
            }
        }
        for (int64_t i = 0; i < size; i++) sum += exponential(read_number(logits[i]) - top[0]);
        for (int64_t k = 0; k < ranks; k++) {
            float value = top[k] - top[0] - __builtin_logf(sum);
            memcpy(log_prob + k, &value, sizeof value);
            token[k] = (int32_t)tokens[index[k]];
        }
    }
}

#include "growing.h"

#ifdef BFLOAT16
typedef int16_t ordered;
#define MOST_ORDERED INT16_MAX
#define INFINITE 0x7f80 /* bits */
#else
typedef int32_t ordered;
#define MOST_ORDERED INT32_MAX
#define INFINITE 0x7f800000
#endif

/* Map a number to an integer of the same order; both zeros are equal, and NaN is the largest. */
static inline ordered in_order(number x) {
    ordered bits;
    memcpy(&bits, &x, sizeof bits);
    ordered size = bits & MOST_ORDERED, value = bits < 0 ? -size : size;
    return size > INFINITE ? MOST_ORDERED : value;
}

typedef struct {
    ordered most;
    int64_t at;
} found;

typedef ordered orders __attribute__((vector_size(4 * LANES)));
#define MANY (int64_t)(sizeof(orders) / sizeof(ordered))
#define BLOCK (16 * MANY)

/* Find the first maximum. */
static found largest(const number *x, int64_t start, int64_t end) {
    found best = {in_order(x[start]), start};
    for (int64_t stop; start < end; start = stop) {
        ordered of_block = in_order(x[start]);
        stop = start + BLOCK < end ? start + BLOCK : end;
        if (stop - start < BLOCK)
            for (int64_t i = start; i < stop; i++) of_block = in_order(x[i]) > of_block ? in_order(x[i]) : of_block;
        else { /* `in_order`, vectorised by hand, since compilers do not */
            orders most = of_block - (orders){0};
            for (int64_t i = start; i < stop; i += MANY) {
                orders bits;
                memcpy(&bits, x + i, sizeof bits);
                orders size = bits & MOST_ORDERED, negative = bits < 0, none = size > INFINITE;
                orders value = ((((size ^ negative) - negative) & ~none) | (none & MOST_ORDERED)), larger = value > most;
                most = (value & larger) | (most & ~larger);
            }
            for (int64_t l = 0; l < MANY; l++) of_block = most[l] > of_block ? most[l] : of_block;
        }
        if (of_block > best.most) best.most = of_block, best.at = start;
    }
    while (in_order(x[best.at]) != best.most) best.at++;
    return best;
}

/* Argmax of each row, the first of several. Each thread scans the outputs that it wrote in a product (see prepacked.c),
   which are in its cache. */
int argmax_rows(const number *x, int64_t *out, int64_t rows, int64_t size, int threads) {
    int64_t parts = size < threads ? size : threads;
    int64_t bytes = parts * rows * sizeof(found);
    found *of_parts = thread_scratch(4, bytes);
    if (!of_parts) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t m = 0; m < rows; m++)
            of_parts[part * rows + m] = largest(x + m * size, size * part / parts, size * (part + 1) / parts);
    for (int64_t m = 0; m < rows; m++) {
        found best = of_parts[m];
        for (int64_t part = 1; part < parts; part++)
            if (of_parts[part * rows + m].most > best.most) best = of_parts[part * rows + m];
        out[m] = best.at;
    }
    release(of_parts, bytes);
    return 0;
}
