/* Attention of a few new tokens of each row over the slots that this row has in sight. */

#include "panels.h"

#define WIDE (2 * VECTORS) /* vectors of a value that are added together for few queries */
#define WORTH_THREADS 30000 /* numbers that are turned and kept */
#define LEAST 4 /* queries that are worth their own pass over the keys, where threads would have nothing to do */

/* Keys of `count` slots, at most PANEL, as a panel of their `size` inputs; slots that it has too much are zeros. */
static void to_panel(const number *keys, int64_t count, int64_t size, number *panel) {
    int64_t done = 0;
#if LANES == 16 && (STEP == 2 || !defined(BFLOAT16)) /* sixteen slots of sixteen floats, or pairs, at a time */
    for (int v = 0; v < VECTORS; v++)
        for (done = 0; done + 16 * STEP <= size; done += 16 * STEP) {
            __m512i x[16], y[16];
            for (int s = 0; s < 16; s++) __builtin_prefetch(keys + (PANEL + v * 16 + s) * size + done);
            for (int s = 0; s < 16; s++)
                x[s] = v * 16 + s < count ? _mm512_loadu_si512(keys + (v * 16 + s) * size + done) : _mm512_setzero_si512();
            for (int k = 0; k < 16; k += 2) {
                y[k] = _mm512_unpacklo_epi32(x[k], x[k + 1]);
                y[k + 1] = _mm512_unpackhi_epi32(x[k], x[k + 1]);
            }
            for (int k = 0; k < 16; k += 4)
                for (int j = 0; j < 2; j++) {
                    x[k + 2 * j] = _mm512_unpacklo_epi64(y[k + j], y[k + 2 + j]);
                    x[k + 2 * j + 1] = _mm512_unpackhi_epi64(y[k + j], y[k + 2 + j]);
                }
            for (int k = 0; k < 16; k += 8)
                for (int j = 0; j < 4; j++) {
                    y[k + j] = _mm512_shuffle_i32x4(x[k + j], x[k + 4 + j], 0x88);
                    y[k + 4 + j] = _mm512_shuffle_i32x4(x[k + j], x[k + 4 + j], 0xdd);
                }
            number *to = panel + done * PANEL + v * 16 * STEP;
            for (int j = 0; j < 8; j++) {
                _mm512_storeu_si512(to + j * STEP * PANEL, _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88));
                _mm512_storeu_si512(to + (8 + j) * STEP * PANEL, _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd));
            }
        }
#elif LANES == 8 && defined(__AVX2__) && !defined(BFLOAT16) /* eight slots of eight floats */
    for (int v = 0; v < VECTORS; v++)
        for (done = 0; done + 8 <= size; done += 8) {
            __m256 x[8], y[8];
            for (int s = 0; s < 8; s++) __builtin_prefetch(keys + (PANEL + v * 8 + s) * size + done);
            for (int s = 0; s < 8; s++)
                x[s] = v * 8 + s < count ? _mm256_loadu_ps(keys + (v * 8 + s) * size + done) : _mm256_setzero_ps();
            for (int k = 0; k < 8; k += 2) {
                y[k] = _mm256_unpacklo_ps(x[k], x[k + 1]);
                y[k + 1] = _mm256_unpackhi_ps(x[k], x[k + 1]);
            }
            for (int k = 0; k < 8; k += 4)
                for (int j = 0; j < 2; j++) {
                    x[k + 2 * j] = _mm256_shuffle_ps(y[k + j], y[k + 2 + j], 0x44);
                    x[k + 2 * j + 1] = _mm256_shuffle_ps(y[k + j], y[k + 2 + j], 0xee);
                }
            float *to = panel + done * PANEL + v * 8;
            for (int j = 0; j < 4; j++) {
                _mm256_storeu_ps(to + j * PANEL, _mm256_permute2f128_ps(x[j], x[4 + j], 0x20));
                _mm256_storeu_ps(to + (4 + j) * PANEL, _mm256_permute2f128_ps(x[j], x[4 + j], 0x31));
            }
        }
#endif
    for (; done < size; done++)
        for (int64_t s = 0; s < PANEL; s++)
            panel[done / STEP * STEP * PANEL + s * STEP + done % STEP] = s < count ? keys[s * size + done] : 0;
}

typedef struct {
    const number *keys, *values; /* of a row and head, slot after slot from the first that is seen */
    int64_t seen, size, out_size;
    float scaling, *scores; /* [MOST, room] */
    int64_t room;
    number *panels; /* of keys, each so many numbers after the other (0: there is room for one); they may be there already */
    int64_t apart;
    int turned;
} sight;

static inline __attribute__((always_inline)) void score(const int queries, const sight *of, const float *x,
                                                        const number *panel, int64_t slot) {
    lanes sums[MOST][VECTORS];
    clear(queries, sums);
    add_products(queries, WHOLE, x, panel, of->size, (ahead){(const char *)panel, 0}, sums);
    for (int q = 0; q < queries; q++) memcpy(of->scores + q * of->room + slot, sums[q], sizeof sums[q]);
}

/* Numbers of what queries find, from the `at`-th on: so many vectors. */
static inline __attribute__((always_inline)) void mix(const int queries, const int vectors, const sight *of, int64_t at,
                                                      const float *total, number *const *out) {
    lanes sums[MOST][WIDE];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = (lanes){0};
    for (int64_t s = 0; s < of->seen; s++) {
        lanes value[WIDE];
        for (int v = 0; v < vectors; v++) {
            value[v] = widened(of->values + s * of->out_size + at + v * LANES);
            __builtin_prefetch(of->values + (s + 16) * of->out_size + at + v * LANES);
        }
        for (int q = 0; q < queries; q++) {
            lanes share = everywhere(of->scores[q * of->room + s]);
            for (int v = 0; v < vectors; v++) sums[q][v] += value[v] * share;
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) {
            lanes found = sums[q][v] / total[q];
            for (int l = 0; l < LANES; l++) out[q][at + v * LANES + l] = rounded(found[l]);
        }
}

/* What `count` queries find, each with its mask (NULL for none), and where that goes; x are the queries side by side. */
static void find(const sight *of, int64_t count, const float *x, const number *const *masks, number *const *out) {
    for (int64_t s = 0; s < of->seen; s += PANEL) {
        number *panel = of->panels + s / PANEL * of->apart;
        if (!of->turned) to_panel(of->keys + s * of->size, of->seen - s, of->size, panel);
#define SCORE(count) score(count, of, x, panel, s)
        OF_ROWS(count, SCORE)
    }
    int64_t padded = (of->seen + PANEL - 1) / PANEL * PANEL; /* no loop ends in single numbers, with other roundings */
    float total[MOST];
    for (int64_t q = 0; q < count; q++) {
        float *score = of->scores + q * of->room, most_of[LANES], most = -__builtin_inff();
        double sum = 0; /* whose rounding does not depend on where slots lie that are not seen */
        const number *mask = masks[q];
        for (int64_t s = 0; s < of->seen; s++) score[s] = score[s] * of->scaling + (mask ? read_number(mask[s]) : 0);
        for (int64_t s = of->seen; s < padded; s++) score[s] = most;
        for (int l = 0; l < LANES; l++) most_of[l] = most;
        for (int64_t s = 0; s < padded; s += LANES)
            for (int l = 0; l < LANES; l++) most_of[l] = score[s + l] > most_of[l] ? score[s + l] : most_of[l];
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) most_of[l] = most_of[l + half] > most_of[l] ? most_of[l + half] : most_of[l];
        most = most_of[0];
        for (int64_t s = 0; s < padded; s++) { /* what is hidden is worth nothing at all */
            float below = score[s] - most;
            sum += score[s] = below > -87 ? exponential(below) : 0;
        }
        total[q] = sum;
    }
    int64_t at = 0;
    if (count <= MOST / 2)
        for (; at + WIDE * LANES <= of->out_size; at += WIDE * LANES) {
#define MIX_WIDE(count) mix(count, WIDE, of, at, total, out)
            OF_ROWS(count, MIX_WIDE)
        }
    for (; at + VECTORS * LANES <= of->out_size; at += VECTORS * LANES) {
#define MIX(count) mix(count, VECTORS, of, at, total, out)
        OF_ROWS(count, MIX)
    }
    for (; at + LANES <= of->out_size; at += LANES) {
#define MIX_ONE(count) mix(count, 1, of, at, total, out)
        OF_ROWS(count, MIX_ONE)
    }
    for (; at < of->out_size; at++)
        for (int64_t q = 0; q < count; q++) {
            double sum = 0;
            for (int64_t s = 0; s < of->seen; s++)
                sum += of->scores[q * of->room + s] * read_number(of->values[s * of->out_size + at]);
            out[q][at] = rounded((float)sum / total[q]);
        }
}

/* Queries [rows, heads * groups, tokens, size], with strides in numbers from row to row, head to head and token to token;
   keys and values of a row and head lie together, slot after slot. A row has `slots` in sight, of which it sees those from
   `first` on, or the last `window` where that is not 0. Masks [.., tokens, slots from `first` on], if there are any, are
   added to scores. out [rows, tokens, heads * groups, out_size]. */
void attend(const number *queries, const int64_t *query_strides, const number *keys, const int64_t *key_strides,
            const number *values, const int64_t *value_strides, const number *mask, const int64_t *mask_strides,
            const int64_t *slots, number *out, int64_t rows, int64_t heads, int64_t groups, int64_t tokens, int64_t size,
            int64_t out_size, int64_t first, int64_t window, float scaling, int threads) {
    int64_t pairs = rows * heads, all = groups * tokens, parts = (all + MOST - 1) / MOST, room = 0;
    while (pairs * parts % threads && (parts + 1) * LEAST <= all) parts++;
    for (int64_t row = 0; row < rows; row++) room = slots[row] > room ? slots[row] : room;
    room = (room + PANEL - 1) / PANEL * PANEL;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        /* Keys that several parts of the queries meet one after the other are turned once. */
        int64_t apart = parts > 1 ? PANEL * size : 0, latest = -1;
        int64_t bytes = (MOST * (size + room) + (apart ? room : PANEL) * size) * sizeof(float);
        float *x = own_memory(0, bytes);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < pairs * parts; task++) {
            int64_t row = task / parts / heads, head = task / parts % heads, part = task % parts;
            int64_t start = all * part / parts, count = all * (part + 1) / parts - start;
            int64_t begin = window && slots[row] > window ? slots[row] - window : first;
            const number *from[MOST], *masks[MOST];
            number *to[MOST];
            for (int64_t q = 0; q < count; q++) {
                int64_t of_head = head * groups + (start + q) / tokens, token = (start + q) % tokens;
                from[q] = queries + row * query_strides[0] + of_head * query_strides[1] + token * query_strides[2];
                masks[q] = mask ? mask + row * mask_strides[0] + token * mask_strides[1] : NULL;
                to[q] = out + ((row * tokens + token) * heads * groups + of_head) * out_size;
            }
            side_by_side(from, count, size, x);
            sight of = {keys + row * key_strides[0] + head * key_strides[1] + begin * size,
                        values + row * value_strides[0] + head * value_strides[1] + begin * out_size,
                        slots[row] - begin, size, out_size, scaling, x + MOST * size, room,
                        (number *)(x + MOST * (size + room)), apart, task / parts == latest};
            latest = task / parts;
            find(&of, count, x, masks, to);
        }
        leave(x, bytes);
    }
}

/* A head's numbers turned by their position; the sines of the first half have the other sign. Rounded where torch does. */
static void turn(number *x, const number *restrict cos, const number *restrict sin, int64_t size) {
    number *restrict low = x, *restrict high = x + size / 2;
    for (int64_t d = 0; d < size / 2; d++) {
        float a = read_number(low[d]), b = read_number(high[d]);
        float of_low = read_number(rounded(a * read_number(cos[d])));
        float of_high = read_number(rounded(b * read_number(cos[d + size / 2])));
        low[d] = rounded(of_low + read_number(rounded(b * read_number(sin[d]))));
        high[d] = rounded(of_high + read_number(rounded(a * read_number(sin[d + size / 2]))));
    }
}

/* The same for queries, keys and values that lie side by side in `joined` [rows, tokens, heads * (groups + 2) * size]:
   queries and keys get their norms [size], where these are not NULL, and are turned by angles [rows, tokens, size], in
   place; keys and values go to the last slots that their row has in sight. */
void attend_joined(number *joined, const number *query_norm, const number *key_norm, float eps, const number *cos,
                   const number *sin, number *keys, const int64_t *key_strides,
                   number *values, const int64_t *value_strides, const number *mask, const int64_t *mask_strides,
                   const int64_t *slots, number *out, int64_t rows, int64_t heads, int64_t groups, int64_t tokens,
                   int64_t size, int64_t first, int64_t window, float scaling, int threads) {
    int64_t width = heads * (groups + 2) * size, strides[] = {tokens * width, size, width};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * tokens * width > WORTH_THREADS)
    for (int64_t m = 0; m < rows * tokens; m++) {
        number *of_token = joined + m * width, *key = of_token + heads * groups * size, *value = key + heads * size;
        for (number *head = of_token; head < value; head += size) {
            const number *norm = head < key ? query_norm : key_norm;
            if (norm) norm_row(head, norm, head, size, eps);
            turn(head, cos + m * size, sin + m * size, size);
        }
        int64_t row = m / tokens, at = (slots[row] - tokens + m % tokens) * size;
        for (int64_t head = 0; head < heads; head++) {
            memcpy(keys + row * key_strides[0] + head * key_strides[1] + at, key + head * size, size * sizeof *key);
            memcpy(values + row * value_strides[0] + head * value_strides[1] + at, value + head * size, size * sizeof *key);
        }
    }
    attend(joined, strides, keys, key_strides, values, value_strides, mask, mask_strides, slots, out, rows, heads, groups,
           tokens, size, size, first, window, scaling, threads);
}
