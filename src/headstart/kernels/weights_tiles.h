/* Unquantised bfloat16 weights, multiplied by tiles: sixteen rows by a panel at once. Batch-invariant: the order of sums
   does not depend on the number of rows. */

#include "tiles.h"

#define IN_TILES 1
#define TOGETHER 32 /* rows multiplied together: two tiles */
#define AHEAD 8192  /* prefetch distance in bytes if weights are read once */
#define FEW TOGETHER /* up to here, every thread lays out all rows */
#define OF_GROUP(count, work) work((int)(count));

static inline int64_t padded(int64_t inputs) { return (inputs + TILE - 1) / TILE * TILE; }

static inline int64_t bytes_of_panel(int64_t inputs, int storage) { return PANEL * padded(inputs) * sizeof(number); }

static inline int64_t floats_of_row(int64_t inputs) { return padded(inputs) / 2; }

static inline int64_t rows_of(int64_t count, int64_t tile) {
    int64_t left = count - tile * OF_TILE;
    return left < OF_TILE ? left : OF_TILE;
}

/* Lay out rows as zero-padded tiles of TILE inputs of each row. */
static inline void read_rows(const number *const *rows, int64_t count, int64_t inputs, float *out) {
    number *to = (number *)out;
    for (int64_t tile = 0; tile * OF_TILE < count; tile++)
        for (int64_t i = 0; i < inputs; i += TILE)
            for (int64_t m = 0; m < rows_of(count, tile); m++, to += TILE) {
                const number *from = rows[tile * OF_TILE + m] + i;
                if (inputs - i < TILE) {
                    memset(to, 0, TILE * sizeof *to);
                    memcpy(to, from, (inputs - i) * sizeof *to);
                } else memcpy(to, from, TILE * sizeof *to); /* a constant size avoids the call */
            }
}

static inline __attribute__((always_inline)) void add_up(const int rows, const int storage, const float *x,
                                                         const void *panel, int64_t inputs, ahead next,
                                                         lanes totals[TOGETHER][VECTORS]) {
    const char *weights = panel, *first = (const char *)x, *second = first + OF_TILE * floats_of_row(inputs) * sizeof *x;
    const int64_t of_row = TILE * sizeof(number), from_to = PANEL * STEP * sizeof(number);
    const int64_t of_first = (rows > OF_TILE ? OF_TILE : rows) * of_row, of_second = (rows - OF_TILE) * of_row;
    __asm__ volatile("" ::: "memory"); /* finish writes before tiles read */
    _tile_zero(0);
    _tile_zero(2);
    if (rows > OF_TILE) {
        _tile_zero(1);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < inputs; i += TILE, first += of_first, second += of_second) {
        for (int64_t byte = 0; byte < TILE / STEP * next.each; byte += LINE)
            if (rows > OF_TILE) __builtin_prefetch(next.from + byte, 0, 2); /* leave L1 to rows and sums */
            else __builtin_prefetch(next.from + byte, 0, 3);
        next.from += TILE / STEP * next.each;
        if (rows > OF_TILE && next.each) { /* weights are read once, rows should stay cached */
            _tile_stream_loadd(6, weights, from_to);
            _tile_stream_loadd(7, weights + 64, from_to);
        } else {
            _tile_loadd(6, weights, from_to);
            _tile_loadd(7, weights + 64, from_to);
        }
        weights += TILE * from_to / STEP;
        _tile_loadd(4, first, of_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        if (rows > OF_TILE) {
            _tile_loadd(5, second, of_row);
            _tile_dpbf16ps(1, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, totals, sizeof *totals);
    _tile_stored(2, (char *)totals + 64, sizeof *totals);
    if (rows > OF_TILE) {
        _tile_stored(1, totals + OF_TILE, sizeof *totals);
        _tile_stored(3, (char *)(totals + OF_TILE) + 64, sizeof *totals);
    }
}

/* Whether products support this number of inputs. */
int reads(int64_t inputs) { return inputs % STEP == 0; }

int best_storage(const number *weights, int64_t count, int threads) { return FULL; }

/* Pack weights [count, inputs] into a zero-padded panel. */
static void pack_panel(const number *weights, int64_t count, int64_t inputs, int storage, void *panel) {
    number *to = panel;
    memset(to, 0, bytes_of_panel(inputs, storage));
    for (int64_t l = 0; l < PANEL && l < count; l++)
        for (int64_t i = 0; i < inputs; i++)
            to[i / STEP * STEP * PANEL + l * STEP + i % STEP] = weights[l * inputs + i];
}

static void widen_panel(const void *panel, int64_t inputs, number *out) {}
