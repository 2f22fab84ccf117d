/* Products of token copies and their experts' matrices on a CPU: forward, and the gradients of both.
 *
 * A library's product of one expert is small: it packs the whole matrix for a few rows, and threads have little to do.
 * Here all experts are one piece of work, divided over threads; blocks of both factors are converted to fp32 where they
 * are packed, so that bf16 costs no pass of its own; and an expert with few rows pays for few. Every element is summed
 * in one order, whatever the number of threads.
 *
 * The three products are one, with factors as they lie or transposed: y = x w; w' = x^T y'; and x'^T = w y'^T, because
 * of w and y' the latter is cheaper to transpose. dtype: 0 is fp32, 1 is bf16.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_dtypes.h"

#ifndef CPU_HAS
#define CPU_HAS(feature) __builtin_cpu_supports(feature)
#endif
#define ROWS 6      /* of a tile: with the columns below they fill the registers */
#define DEPTH 512   /* of a block, whose columns stay in the second cache */
#define HEIGHT 240  /* rows of a block, a multiple of ROWS */
#define WIDTH 1024  /* columns of a block, at most */

typedef void Tile(const float *a, const float *b, int64_t depth, int64_t b_width, float *c, int64_t c_width, int more);

/* c (ROWS × vectors) = a (ROWS × depth) · b (depth × vectors), added to c with `more`. Sums stay in registers. */
#define EACH_ROW(M, ...)                                                                        \
    M(0, __VA_ARGS__) M(1, __VA_ARGS__) M(2, __VA_ARGS__) M(3, __VA_ARGS__) M(4, __VA_ARGS__) \
    M(5, __VA_ARGS__)
#define COLUMNS1(M, i) M(i, 0)
#define COLUMNS2(M, i) M(i, 0) M(i, 1)
#define COLUMNS3(M, i) M(i, 0) M(i, 1) M(i, 2)
#define COLUMNS4(M, i) M(i, 0) M(i, 1) M(i, 2) M(i, 3)
#define BEGIN(i, j) Vector c##i##j = more ? *(Vector *)(c + i * c_width + j * lanes) : (Vector){0};
#define READ(i, j) Vector b##j = *(const Vector *)(b + k * b_width + j * lanes);
#define ADD(i, j) c##i##j += a[i * depth + k] * b##j;
#define END(i, j) *(Vector *)(c + i * c_width + j * lanes) = c##i##j;
#define APPLY(i, columns, M) columns(M, i)
#define TILE(name, target, bytes, columns)                                                                   \
    target static void name(const float *a, const float *b, int64_t depth, int64_t b_width, float *c,        \
                            int64_t c_width, int more) {                                                      \
        typedef float Vector __attribute__((vector_size(bytes), aligned(4), may_alias));                      \
        const int64_t lanes = (bytes) / 4;                                                                    \
        EACH_ROW(APPLY, columns, BEGIN)                                                                       \
        for (int64_t k = 0; k < depth; k++) {                                                                 \
            columns(READ, 0)                                                                                  \
            EACH_ROW(APPLY, columns, ADD)                                                                     \
        }                                                                                                     \
        EACH_ROW(APPLY, columns, END)                                                                         \
    }

/* Of a processor: floats in a vector, and tiles of one vector and more. */
typedef struct {
    int64_t lanes, vectors;
    Tile *tiles[4];
} Machine;

TILE(tile_1, , 16, COLUMNS1)
TILE(tile_2, , 16, COLUMNS2)
#if defined(__x86_64__) && defined(__GNUC__)
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f")))
TILE(tile_avx2_1, AVX2, 32, COLUMNS1)
TILE(tile_avx2_2, AVX2, 32, COLUMNS2)
TILE(tile_avx512_1, AVX512, 64, COLUMNS1)
TILE(tile_avx512_2, AVX512, 64, COLUMNS2)
TILE(tile_avx512_3, AVX512, 64, COLUMNS3)
TILE(tile_avx512_4, AVX512, 64, COLUMNS4)
#endif

static Machine this_machine(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (CPU_HAS("avx512f"))
        return (Machine){16, 4, {tile_avx512_1, tile_avx512_2, tile_avx512_3, tile_avx512_4}};
    if (CPU_HAS("avx2") && __builtin_cpu_supports("fma"))
        return (Machine){8, 2, {tile_avx2_1, tile_avx2_2}};
#endif
    return (Machine){4, 2, {tile_1, tile_2}};
}

/* A matrix in memory, as it lies or transposed. */
typedef struct {
    const void *tensor;
    int64_t at, width;
    int transposed;
} Matrix;

/* rows × columns from (row, column), to a block whose rows are `stride` apart; the rest of `wide` columns is zero. */
KERNEL void pack(float *to, int64_t stride, Matrix m, int64_t row, int64_t column, int64_t rows, int64_t columns,
                 int64_t wide, int dtype) {
    for (int64_t r = 0; r < rows; r++) {
        float *line = to + r * stride;
        if (!m.transposed)
            load(line, m.tensor, m.at + (row + r) * m.width + column, columns, dtype);
        else if (dtype == BF16) {
            const uint16_t *from = (const uint16_t *)m.tensor + m.at + column * m.width + row + r;
            for (int64_t c = 0; c < columns; c++) line[c] = from_bits((uint32_t)from[c * m.width] << 16);
        } else {
            const float *from = (const float *)m.tensor + m.at + column * m.width + row + r;
            for (int64_t c = 0; c < columns; c++) line[c] = from[c * m.width];
        }
        for (int64_t c = columns; c < wide; c++) line[c] = 0;
    }
}

KERNEL void unpack(void *tensor, Matrix m, const float *from, int64_t stride, int64_t row, int64_t column, int64_t rows,
                   int64_t columns, int dtype) {
    if (!m.transposed) {
        for (int64_t r = 0; r < rows; r++)
            store(tensor, m.at + (row + r) * m.width + column, from + r * stride, columns, dtype);
        return;
    }
    float line[HEIGHT];
    for (int64_t c = 0; c < columns; c++) {
        for (int64_t r = 0; r < rows; r++) line[r] = from[r * stride + c];
        store(tensor, m.at + (column + c) * m.width + row, line, rows, dtype);
    }
}

/* Memory of a thread: blocks of both factors and of the product. */
typedef struct {
    float *a, *b, *c;
} Blocks;

/* c = a · b for the rows and columns of c that are given. */
static void multiply(Machine machine, Blocks blocks, Matrix a, Matrix b, Matrix c, void *result, int64_t first_row,
                     int64_t rows, int64_t first_column, int64_t columns, int64_t depth, int dtype) {
    int64_t most = machine.lanes * machine.vectors;
    for (int64_t i = 0; i < rows; i += HEIGHT) {
        int64_t height = rows - i < HEIGHT ? rows - i : HEIGHT;
        for (int64_t j = 0; j < columns; j += WIDTH) {
            int64_t width = columns - j < WIDTH ? columns - j : WIDTH;
            int64_t padded = (width + machine.lanes - 1) / machine.lanes * machine.lanes;
            for (int64_t k = 0; k < depth; k += DEPTH) {
                int64_t deep = depth - k < DEPTH ? depth - k : DEPTH;
                pack(blocks.a, deep, a, first_row + i, k, height, deep, deep, dtype);
                memset(blocks.a + height * deep, 0, 4 * ((height + ROWS - 1) / ROWS * ROWS - height) * deep);
                for (int64_t p = 0; p < padded; p += most) {
                    int64_t vectors = (padded - p < most ? padded - p : most) / machine.lanes;
                    int64_t held = width - p < most ? width - p : most;
                    pack(blocks.b, most, b, k, first_column + j + p, deep, held, vectors * machine.lanes, dtype);
                    for (int64_t r = 0; r < height; r += ROWS)
                        machine.tiles[vectors - 1](blocks.a + r * deep, blocks.b, deep, most,
                                                   blocks.c + r * WIDTH + p, WIDTH, k > 0);
                }
            }
            unpack(result, c, blocks.c, WIDTH, first_row + i, first_column + j, height, width, dtype);
        }
    }
}

enum { FORWARD, INPUT, WEIGHT };

/* One of the three products for all experts; `ends` are the rows after each one's last. Returns 0, or 1 without memory.
 *
 * x: N × D, w: experts × D × F, y: N × F. FORWARD writes y, INPUT x, WEIGHT w; the other two are read. */
int danlu_grouped_mm(int kind, void *x, void *w, void *y, const int64_t *ends, int64_t experts, int64_t d, int64_t f,
                     int dtype, int threads) {
    if (!experts) return 0;
    Machine machine = this_machine();
    int64_t parts = (3 * threads + experts - 1) / experts, failed = 0;
    /* Parts of an expert's product are of columns of y, or rows of w: whole groups of vectors or rows. */
    int64_t unit = kind == FORWARD ? machine.lanes * machine.vectors : ROWS, length = kind == FORWARD ? f : d;
    int64_t units = (length + unit - 1) / unit;
    if (parts > units) parts = units;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        Blocks blocks = {aligned_alloc(64, 4 * HEIGHT * DEPTH), aligned_alloc(64, 4 * DEPTH * 64),
                         aligned_alloc(64, 4 * HEIGHT * WIDTH)};
        failed |= !blocks.a || !blocks.b || !blocks.c;
#pragma omp for schedule(dynamic)
        for (int64_t piece = 0; piece < experts * parts; piece++) {
            if (failed) continue; /* all threads must meet this loop, also one without memory */
            int64_t expert = piece / parts, part = piece % parts;
            int64_t begin = units * part / parts * unit, end = units * (part + 1) / parts * unit;
            int64_t first = expert ? ends[expert - 1] : 0, rows = ends[expert] - first;
            if (end > length) end = length;
            Matrix of_x = {x, first * d, d, 0}, of_w = {w, expert * d * f, f, 0}, of_y = {y, first * f, f, 0};
            Matrix x_turned = {x, first * d, d, 1}, y_turned = {y, first * f, f, 1};
            if (kind == FORWARD)
                multiply(machine, blocks, of_x, of_w, of_y, y, 0, rows, begin, end - begin, d, dtype);
            else if (kind == INPUT)
                multiply(machine, blocks, of_w, y_turned, x_turned, x, begin, end - begin, 0, rows, f, dtype);
            else if (rows)
                multiply(machine, blocks, x_turned, of_y, of_w, w, begin, end - begin, 0, f, rows, dtype);
            else
                memset((char *)w + (dtype == BF16 ? 2 : 4) * (expert * d + begin) * f, 0,
                       (dtype == BF16 ? 2 : 4) * (end - begin) * f);
        }
        free(blocks.a), free(blocks.b), free(blocks.c);
    }
    return failed != 0;
}
