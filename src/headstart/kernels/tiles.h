/* Tiles of bfloat16 (AMX): up to sixteen rows by sixteen columns, in steps of TILE elements, hardly slower than one row. The
   order of sums does not depend on the place in a tile: even and odd elements of TILE, then both, then the total. */

#define TILE 32    /* elements of a row */
#define OF_TILE 16 /* rows, or columns */

/* Configure a thread's tiles for at most `rows` rows; `end` releases them. Tiles 0 and 2 are sums of the first sixteen
   rows, 1 and 3 of the rest; 4 and 5 hold rows, 6 and 7 columns. */
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
