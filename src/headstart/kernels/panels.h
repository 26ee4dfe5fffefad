/* Products of rows with panels: for each input (or STEP = 2 of them with bfloat16 instructions) PANEL outputs, so that
   memory is read as one stream and sums stay in registers. Batch-invariant: the order of sums does not depend on the
   number of rows. */

#include <pthread.h>
#include <stdlib.h>

#include "numbers.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define STEP 2
#else
#define STEP 1
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LANES 16
#ifdef EIGHT_BITS
#define MOST 8
#else
#define MOST 12 /* rows multiplied together: their sums stay in registers */
#endif
#else
#define LANES 8
#ifdef EIGHT_BITS
#define MOST 5 /* the sums of six rows would leave too few of sixteen registers for products */
#else
#define MOST 6
#endif
#endif
#define VECTORS 2
#define PANEL (VECTORS * LANES)

typedef float lanes __attribute__((vector_size(4 * LANES)));

/* LANES 32-bit integers. */
#if LANES == 16
typedef __m512i ints;
#define BROADCAST(x) _mm512_set1_epi32(x)
#define AS_FLOATS(x) _mm512_cvtepi32_ps(x)
#elif defined(__AVX2__)
#include <immintrin.h>
typedef __m256i ints;
#define BROADCAST(x) _mm256_set1_epi32(x)
#define AS_FLOATS(x) _mm256_cvtepi32_ps(x)
#endif

/* Expand upper halves to floats, as from bfloat16. */
static inline lanes of_halves(const uint16_t *from) {
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
    halves x;
    memcpy(&x, from, sizeof x);
    return (lanes)(__builtin_convertvector(x, bits) << 16);
}

static inline lanes widened(const number *from) {
#ifdef BFLOAT16
    return of_halves(from);
#else
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
#endif
}

static inline void write_rounded(lanes x, number *to) {
#ifdef BFLOAT16
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
    bits of = (bits)x;
    halves upper = __builtin_convertvector((of + 0x7fff + ((of >> 16) & 1)) >> 16, halves); /* as `rounded` does */
    memcpy(to, &upper, sizeof upper);
#else
    memcpy(to, &x, sizeof x);
#endif
}

/* Storage of a panel's weights. */
#define FULL 0   /* as elements */
#define HALVES 1 /* float32 as its upper half, which is bfloat16, if all lower halves are zero */

#if STEP == 2
typedef __m512i of_panel;

static inline of_panel read_panel(const void *from, int storage) { return _mm512_loadu_si512(from); }

static inline void add_product(lanes *sums, of_panel inputs, lanes x) {
    *sums = (lanes)_mm512_dpbf16_ps((__m512)*sums, (__m512bh)inputs, (__m512bh)x);
}
#else
typedef lanes of_panel;

static inline of_panel read_panel(const void *from, int storage) { return storage == HALVES ? of_halves(from) : widened(from); }

static inline void add_product(lanes *sums, of_panel inputs, lanes x) { *sums += inputs * x; }
#endif

/* Keep a value in a register; else compilers fold the load into each product and read it again. */
#ifdef __AVX__
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x)
#endif

/* Broadcast a number, or STEP of them, to all lanes. */
static inline lanes broadcast(float x) {
    lanes all = x - (lanes){0};
    IN_REGISTER(all);
    return all;
}

/* Memory to prefetch at each step of a product: start, and bytes per step. */
typedef struct {
    const char *from;
    int64_t each;
} ahead;

#define LINE 64 /* bytes of a cache line */
/* Prefetch locality: weights, read once per forward, should not evict draft heads and KV cache. With AVX-512 a similar
   attempt gained nothing. */
#ifdef __AVX512F__
#define STAYS 3
#else
#define STAYS 0
#endif

#define NO_MEMORY -1 /* status: scratch buffers cannot be allocated, see `check_status` in memory.py */
#define USES 6       /* kinds of scratch buffers */

typedef struct {
    void *at;
    int64_t bytes;
} buffer;

/* Scratch buffers of up to `kept_bytes` stay with their thread, which frees them when it ends. */
static pthread_key_t kept_key;
static int64_t kept_bytes;

static void free_kept(void *kept) {
    for (buffer *of = kept; of < (buffer *)kept + USES; *of++ = (buffer){0}) free(of->at);
}

static __attribute__((constructor)) void keep_buffers(void) {
    if (!pthread_key_create(&kept_key, free_kept)) kept_bytes = 1 << 20;
}

/* A scratch buffer for one use, until `release`; NULL without memory. Small ones are reused: in a heap that training has
   fragmented, allocating some KB for every product takes a third of a forward. */
static inline void *thread_scratch(int use, int64_t bytes) {
    static _Thread_local buffer kept[USES];
    int64_t rounded_up = (bytes + LINE - 1) / LINE * LINE;
    if (bytes > kept_bytes) return aligned_alloc(LINE, rounded_up);
    if (kept[use].bytes < rounded_up) {
        free(kept[use].at);
        kept[use] = (buffer){0};
        if (pthread_setspecific(kept_key, kept)) return NULL;
        void *at = aligned_alloc(LINE, rounded_up);
        if (at) kept[use] = (buffer){at, rounded_up};
    }
    return kept[use].at;
}

static inline void release(void *scratch, int64_t bytes) {
    if (bytes > kept_bytes) free(scratch);
}

static inline int64_t size_of_weight(int storage) { return storage == HALVES ? 2 : sizeof(number); }

/* Add products to the sums of rows; x is in the layout of `side_by_side`. */
static inline __attribute__((always_inline)) void add_products(const int rows, const int storage, const float *x,
                                                               const void *panel, int64_t inputs, ahead next,
                                                               lanes sums[MOST][VECTORS]) {
    const char *from = panel;
    int64_t each = STEP * PANEL * size_of_weight(storage);
    for (int64_t i = 0; i < inputs / STEP; i++, from += each, next.from += next.each) {
        of_panel read[VECTORS];
        for (int line = 0; line < each; line += LINE) __builtin_prefetch(next.from + line, 0, STAYS);
        for (int v = 0; v < VECTORS; v++) {
            read[v] = read_panel(from + v * each / VECTORS, storage);
            IN_REGISTER(read[v]);
        }
        for (int m = 0; m < rows; m++) {
            lanes of_row = broadcast(x[i * rows + m]);
            for (int v = 0; v < VECTORS; v++) add_product(&sums[m][v], read[v], of_row);
        }
    }
}

static inline __attribute__((always_inline)) void clear(const int rows, lanes sums[MOST][VECTORS]) {
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < VECTORS; v++) sums[m][v] = (lanes){0};
}

/* Interleave at most MOST rows, STEP inputs in each float. */
static inline void side_by_side(const number *const *rows, int64_t count, int64_t inputs, float *out) {
    for (int64_t i = 0; i < inputs; i += STEP)
        for (int64_t m = 0; m < count; m++, out++)
            if (STEP == 2) memcpy(out, rows[m] + i, sizeof *out);
            else *out = read_number(rows[m][i]);
}

#define CASE(work, count)                                                                                              \
    case count: work(count); break;
#if MOST > 8
#define MORE_CASES(work) CASE(work, 6) CASE(work, 7) CASE(work, 8) CASE(work, 9) CASE(work, 10) CASE(work, 11)
#elif MOST > 6
#define MORE_CASES(work) CASE(work, 6) CASE(work, 7)
#else
#define MORE_CASES(work)
#endif
/* Instantiate work for a constant number of rows. */
#define OF_ROWS(count, work)                                                                                           \
    switch (count) {                                                                                                   \
        CASE(work, 1) CASE(work, 2) CASE(work, 3) CASE(work, 4) CASE(work, 5) MORE_CASES(work)                         \
    default: work(MOST);                                                                                               \
    }
