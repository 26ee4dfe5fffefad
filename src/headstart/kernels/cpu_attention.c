/* Attention of a few new tokens per row over the visible slots. */

#include "panels.h"
#if defined(TILES) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && STEP == 2
#include "tiles.h"
#define LONGEST 512 /* elements of a key */
#define BY_TILES(size) ((size) % TILE == 0 && (size) <= LONGEST)
#else
#define BY_TILES(size) 0
#endif

#define WIDE (2 * VECTORS) /* vectors of a value to accumulate together if there are few queries */
#define WORTH_THREADS 30000 /* elements to rotate and write */
#define SLOTS_AHEAD 16 /* prefetch distance in values */
#define MIN_QUERIES 4 /* per pass over the keys, when queries are split so that no thread idles */

#if LANES == 16
/* Transpose sixteen vectors of sixteen floats, or pairs. */
static inline __attribute__((always_inline)) void transpose_vectors(__m512i x[16]) {
    __m512i y[16];
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
    for (int j = 0; j < 8; j++) {
        x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
        x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd);
    }
}
#endif

/* Transpose keys of `count` slots, at most PANEL, into a zero-padded panel; prefetches `next`. */
static void to_panel(const number *keys, int64_t count, int64_t size, const number *next, number *panel) {
    int64_t done = 0;
#if LANES == 16 && (STEP == 2 || !defined(BFLOAT16)) /* 16 slots of 16 floats, or pairs */
    for (int v = 0; v < VECTORS; v++)
        for (done = 0; done + 16 * STEP <= size; done += 16 * STEP) {
            __m512i x[16];
            for (int s = 0; s < 16; s++) __builtin_prefetch(next + (v * 16 + s) * size + done);
            for (int s = 0; s < 16; s++)
                x[s] = v * 16 + s < count ? _mm512_loadu_si512(keys + (v * 16 + s) * size + done) : _mm512_setzero_si512();
            transpose_vectors(x);
            number *to = panel + done * PANEL + v * 16 * STEP;
            for (int j = 0; j < 16; j++) _mm512_storeu_si512(to + j * STEP * PANEL, x[j]);
        }
#elif LANES == 8 && defined(__AVX2__) && !defined(BFLOAT16) /* eight slots of eight floats */
    for (int v = 0; v < VECTORS; v++)
        for (done = 0; done + 8 <= size; done += 8) {
            __m256 x[8], y[8];
            for (int s = 0; s < 8; s++) __builtin_prefetch(next + (v * 8 + s) * size + done);
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
    const number *keys, *values; /* of a row and head, from the first visible slot */
    const number *next_keys;     /* keys of the next task, to prefetch */
    int64_t seen, size, out_size;
    float scaling, *scores; /* [MOST, room] */
    int64_t room;
    number *panels; /* of keys */
    int64_t apart;  /* elements between panels; 0: they share a buffer */
    int transposed; /* whether panels are filled already */
} kv_view;

static inline __attribute__((always_inline)) void score(const int queries, const kv_view *of, const float *x,
                                                        const number *panel, int64_t slot) {
    lanes sums[MOST][VECTORS];
    clear(queries, sums);
    add_products(queries, FULL, x, panel, of->size, (ahead){(const char *)panel, 0}, sums);
    for (int q = 0; q < queries; q++) memcpy(of->scores + q * of->room + slot, sums[q], sizeof sums[q]);
}

#ifdef LONGEST
/* Scores of at most MOST queries. Tile rows are slots, straight from the cache; columns are queries. */
static void score_by_tiles(const kv_view *of, int64_t count, const float *x) {
    number last[OF_TILE * LONGEST];
    float found[OF_TILE * OF_TILE] __attribute__((aligned(LINE)));
    for (int64_t s = 0; s < of->seen; s += OF_TILE) {
        const number *keys = of->keys + s * of->size;
        const number *next = s + 2 * OF_TILE < of->seen ? keys + 2 * OF_TILE * of->size : of->values;
        for (int64_t byte = 0; byte < OF_TILE * of->size * (int64_t)sizeof *next; byte += LINE)
            __builtin_prefetch((const char *)next + byte);
        if (of->seen - s < OF_TILE) keys = memcpy(last, keys, (of->seen - s) * of->size * sizeof *keys);
        __asm__ volatile("" ::: "memory"); /* finish writes before tiles read */
        _tile_zero(0);
        for (int64_t i = 0; i < of->size; i += TILE) {
            _tile_loadd(4, keys + i, of->size * sizeof *keys);
            _tile_loadd(6, x + i / STEP * count, count * sizeof *x); /* columns after the last query are garbage */
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, found, OF_TILE * sizeof *found);
        __m512i rows[16];
        for (int k = 0; k < 16; k++) rows[k] = _mm512_load_si512(found + k * OF_TILE);
        transpose_vectors(rows);
        for (int q = 0; q < MOST; q++)
            if (q < count) _mm512_storeu_si512(of->scores + q * of->room + s, rows[q]);
    }
}
#endif

/* Weighted sums of values, `vectors` vectors from number `at` on. */
static inline __attribute__((always_inline)) void add_values(const int queries, const int vectors, const kv_view *of,
                                                             int64_t at, const float *total, number *const *out) {
    lanes sums[MOST][WIDE];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = (lanes){0};
    for (int64_t s = 0; s < of->seen; s++) {
        int64_t after = s + SLOTS_AHEAD - of->seen;
        const number *next = of->next_keys + after * of->size;
        if (after < 0) next = of->values + (s + SLOTS_AHEAD) * of->out_size + at;
        for (int v = 0; v < vectors; v += LINE / (int)sizeof(number) / LANES) __builtin_prefetch(next + v * LANES);
        lanes value[WIDE];
        for (int v = 0; v < vectors; v++) value[v] = widened(of->values + s * of->out_size + at + v * LANES);
        for (int q = 0; q < queries; q++) {
            lanes share = broadcast(of->scores[q * of->room + s]);
            for (int v = 0; v < vectors; v++) sums[q][v] += value[v] * share;
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) write_rounded(sums[q][v] / total[q], out[q] + at + v * LANES);
}

/* Attend with `count` queries, interleaved in x, each with its mask (or NULL) and output. */
static void attend_queries(const kv_view *of, int64_t count, const float *x, const number *const *masks,
                           number *const *out) {
#ifdef LONGEST
    if (BY_TILES(of->size)) score_by_tiles(of, count, x);
    else
#endif
        for (int64_t s = 0; s < of->seen; s += PANEL) {
            number *panel = of->panels + s / PANEL * of->apart;
            const number *next = s + PANEL < of->seen ? of->keys + (s + PANEL) * of->size : of->values;
            if (!of->transposed) to_panel(of->keys + s * of->size, of->seen - s, of->size, next, panel);
#define SCORE(count) score(count, of, x, panel, s)
            OF_ROWS(count, SCORE)
        }
    int64_t padded = (of->seen + PANEL - 1) / PANEL * PANEL; /* no scalar remainder loops, which round differently */
    float total[MOST];
    for (int64_t q = 0; q < count; q++) {
        float *score = of->scores + q * of->room, most_of[LANES], most = -__builtin_inff();
        double sum = 0; /* rounding must not depend on where hidden slots lie */
        const number *mask = masks[q];
        for (int64_t s = 0; s < of->seen; s++) score[s] = score[s] * of->scaling + (mask ? read_number(mask[s]) : 0);
        for (int64_t s = of->seen; s < padded; s++) score[s] = most;
        for (int l = 0; l < LANES; l++) most_of[l] = most;
        for (int64_t s = 0; s < padded; s += LANES)
            for (int l = 0; l < LANES; l++) most_of[l] = score[s + l] > most_of[l] ? score[s + l] : most_of[l];
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) most_of[l] = most_of[l + half] > most_of[l] ? most_of[l + half] : most_of[l];
        most = most_of[0];
        for (int64_t s = 0; s < padded; s++) { /* hidden slots get exactly 0 */
            float below = score[s] - most;
            sum += score[s] = below > -87 ? exponential(below) : 0;
        }
        total[q] = sum;
    }
    int64_t at = 0;
    if (count <= MOST / 2)
        for (; at + WIDE * LANES <= of->out_size; at += WIDE * LANES) {
#define ADD_VALUES_WIDE(count) add_values(count, WIDE, of, at, total, out)
            OF_ROWS(count, ADD_VALUES_WIDE)
        }
    for (; at + VECTORS * LANES <= of->out_size; at += VECTORS * LANES) {
#define ADD_VALUES(count) add_values(count, VECTORS, of, at, total, out)
        OF_ROWS(count, ADD_VALUES)
    }
    for (; at + LANES <= of->out_size; at += LANES) {
#define ADD_VALUES_ONE(count) add_values(count, 1, of, at, total, out)
        OF_ROWS(count, ADD_VALUES_ONE)
    }
    for (; at < of->out_size; at++)
        for (int64_t q = 0; q < count; q++) {
            double sum = 0;
            for (int64_t s = 0; s < of->seen; s++)
                sum += of->scores[q * of->room + s] * read_number(of->values[s * of->out_size + at]);
            out[q][at] = rounded((float)sum / total[q]);
        }
}

/* Attention: out [rows, tokens, heads * groups, out_size] of queries [rows, heads * groups, tokens, size] with strides of
   rows, heads and tokens. Keys and values are contiguous per row and head. A row sees its `slots` from `first` on, or the
   last `window` if not 0. An additive mask [.., tokens, slots from `first` on] may be NULL. Returns 0 or NO_MEMORY. */
int attend(const number *queries, const int64_t *query_strides, const number *keys, const int64_t *key_strides,
           const number *values, const int64_t *value_strides, const number *mask, const int64_t *mask_strides,
           const int64_t *slots, number *out, int64_t rows, int64_t heads, int64_t groups, int64_t tokens, int64_t size,
           int64_t out_size, int64_t first, int64_t window, float scaling, int threads) {
    int64_t pairs = rows * heads, all = groups * tokens, parts = (all + MOST - 1) / MOST, room = 0;
    while (pairs * parts % threads && (parts + 1) * MIN_QUERIES <= all) parts++;
    for (int64_t row = 0; row < rows; row++) room = slots[row] > room ? slots[row] : room;
    room = (room + PANEL - 1) / PANEL * PANEL;
    int complete = 1;
#pragma omp parallel num_threads(threads) reduction(& : complete) if (threads > 1)
    {
        /* Transpose keys once for consecutive parts of the queries. */
        int64_t apart = parts > 1 && !BY_TILES(size) ? PANEL * size : 0, latest = -1;
        int64_t bytes = (MOST * (size + room) + (apart ? room : PANEL) * size) * sizeof(float);
        float *x = thread_scratch(0, bytes);
        complete = x != NULL;
#ifdef LONGEST
        if (BY_TILES(size)) begin(OF_TILE);
#endif
#pragma omp for schedule(static)
        for (int64_t task = 0; task < pairs * parts; task++) {
            if (!complete) continue;
            int64_t row = task / parts / heads, head = task / parts % heads, part = task % parts;
            int64_t start = all * part / parts, count = all * (part + 1) / parts - start;
            int64_t unseen = window && slots[row] > window ? slots[row] - window : first, after = (task + 1) / parts;
            const number *from[MOST], *masks[MOST];
            number *to[MOST];
            for (int64_t q = 0; q < count; q++) {
                int64_t of_head = head * groups + (start + q) / tokens, token = (start + q) % tokens;
                from[q] = queries + row * query_strides[0] + of_head * query_strides[1] + token * query_strides[2];
                masks[q] = mask ? mask + row * mask_strides[0] + token * mask_strides[1] : NULL;
                to[q] = out + ((row * tokens + token) * heads * groups + of_head) * out_size;
            }
            side_by_side(from, count, size, x);
            kv_view of = {keys + row * key_strides[0] + head * key_strides[1] + unseen * size,
                        values + row * value_strides[0] + head * value_strides[1] + unseen * out_size,
                        keys + after / heads * key_strides[0] + after % heads * key_strides[1] + unseen * size,
                        slots[row] - unseen, size, out_size, scaling, x + MOST * size, room,
                        (number *)(x + MOST * (size + room)), apart, task / parts == latest};
            latest = task / parts;
            attend_queries(&of, count, x, masks, to);
        }
#ifdef LONGEST
        if (BY_TILES(size)) end();
#endif
        release(x, bytes);
    }
    return complete ? 0 : NO_MEMORY;
}

/* Apply rotary positions to a head in place; the sines' first half is negated. Rounds where torch rounds. */
static void rotate(number *x, const number *restrict cos, const number *restrict sin, int64_t size) {
    number *restrict low = x, *restrict high = x + size / 2;
    for (int64_t d = 0; d < size / 2; d++) {
        float a = read_number(low[d]), b = read_number(high[d]);
        float of_low = read_number(rounded(a * read_number(cos[d])));
        float of_high = read_number(rounded(b * read_number(cos[d + size / 2])));
        low[d] = rounded(of_low + read_number(rounded(b * read_number(sin[d]))));
        high[d] = rounded(of_high + read_number(rounded(a * read_number(sin[d + size / 2]))));
    }
}

/* Attention of queries, keys and values in `qkv` [rows, tokens, heads * (groups + 2) * size]. First applies norms [size]
   (or NULL) and rotary angles [rows, tokens, size] in place, and writes keys and values to the row's last slots. */
int attend_qkv(number *qkv, const number *query_norm, const number *key_norm, float eps, const number *cos,
                  const number *sin, number *keys, const int64_t *key_strides,
                  number *values, const int64_t *value_strides, const number *mask, const int64_t *mask_strides,
                  const int64_t *slots, number *out, int64_t rows, int64_t heads, int64_t groups, int64_t tokens,
                  int64_t size, int64_t first, int64_t window, float scaling, int threads) {
    int64_t width = heads * (groups + 2) * size, strides[] = {tokens * width, size, width};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * tokens * width > WORTH_THREADS)
    for (int64_t m = 0; m < rows * tokens; m++) {
        number *of_token = qkv + m * width, *key = of_token + heads * groups * size, *value = key + heads * size;
        for (number *head = of_token; head < value; head += size) {
            const number *norm = head < key ? query_norm : key_norm;
            if (norm) norm_row(head, norm, head, size, eps);
            rotate(head, cos + m * size, sin + m * size, size);
        }
        int64_t row = m / tokens, at = (slots[row] - tokens + m % tokens) * size;
        for (int64_t head = 0; head < heads; head++) {
            memcpy(keys + row * key_strides[0] + head * key_strides[1] + at, key + head * size, size * sizeof *key);
            memcpy(values + row * value_strides[0] + head * value_strides[1] + at, value + head * size, size * sizeof *key);
        }
    }
    return attend(qkv, strides, keys, key_strides, values, value_strides, mask, mask_strides, slots, out, rows, heads,
                  groups, tokens, size, size, first, window, scaling, threads);
}
