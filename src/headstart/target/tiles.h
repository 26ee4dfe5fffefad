/* Tiles of bfloat16 (AMX): up to sixteen rows with sixteen columns, TILE numbers of each at a time, which takes hardly
   longer than for one row. A sum has the same order wherever it lies: first the even numbers of TILE and the odd ones, then
   both, then what came before. */

#define TILE 32    /* numbers of a row */
#define OF_TILE 16 /* rows, or columns */

/* What a thread says before it multiplies so many rows at most, and after. Tiles 0 and 2 are sums of the first rows, 1 and
   3 of the others; 4 and 5 are those rows, 6 and 7 have columns. */
static inline void begin(int64_t rows) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    int64_t second = rows > OF_TILE ? rows - OF_TILE : 1;
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = t > 5 ? TILE / 2 : t % 2 ? second : rows > OF_TILE ? OF_TILE : rows;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); /* GCC 12 takes the intrinsic to read eight bytes */
}

static inline void end(void) { _tile_release(); }
