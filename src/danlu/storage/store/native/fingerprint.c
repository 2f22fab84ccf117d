/* For checkpoint fingerprints: weighted sums of rows, and whether an element is not finite.
 *
 * One function for each width of an element. Both loops are simple so that the compiler vectorizes them; unsigned sums
 * wrap around at 2^64, and so do not depend on the order of additions. Four rows at once keep memory busy: a single row
 * was read at 5.5 GB/s on a Xeon of 2023, four at 9. */

#include <stddef.h>
#include <stdint.h>

#define STRETCH 4096 /* elements checked before deciding whether to continue */

/* sums[row] += scale * (rows[row][0] * weights[0] + rows[row][1] * weights[1] + …); rows lie `stride` elements apart.
 * Whether any element has all bits of `mask` set: in a float, the exponent bits of a non-finite number. */
#define FOR_WIDTH(bits)                                                                                            \
    void danlu_add_row_sums_##bits(const uint##bits##_t *rows, size_t stride, size_t count, size_t width,          \
                                   const uint64_t *weights, uint64_t scale, uint64_t *sums) {                      \
        size_t row = 0;                                                                                            \
        for (; row + 4 <= count; row += 4, rows += 4 * stride) {                                                   \
            const uint##bits##_t *second = rows + stride, *third = second + stride, *fourth = third + stride;      \
            uint64_t a = 0, b = 0, c = 0, d = 0;                                                                   \
            for (size_t column = 0; column < width; column++) {                                                    \
                a += rows[column] * weights[column];                                                               \
                b += second[column] * weights[column];                                                             \
                c += third[column] * weights[column];                                                              \
                d += fourth[column] * weights[column];                                                             \
            }                                                                                                      \
            sums[row] += scale * a, sums[row + 1] += scale * b, sums[row + 2] += scale * c, sums[row + 3] += scale * d;\
        }                                                                                                          \
        for (; row < count; row++, rows += stride) {                                                               \
            uint64_t sum = 0;                                                                                      \
            for (size_t column = 0; column < width; column++) sum += rows[column] * weights[column];               \
            sums[row] += scale * sum;                                                                              \
        }                                                                                                          \
    }                                                                                                              \
    int danlu_any_with_##bits(const uint##bits##_t *elements, size_t count, uint64_t mask) {                       \
        const uint##bits##_t all = (uint##bits##_t)mask;                                                           \
        while (count) {                                                                                            \
            const size_t now = count < STRETCH ? count : STRETCH;                                                  \
            uint##bits##_t found = 0;                                                                              \
            for (size_t at = 0; at < now; at++) found |= (elements[at] & all) == all;                              \
            if (found) return 1;                                                                                   \
            elements += now, count -= now;                                                                         \
        }                                                                                                          \
        return 0;                                                                                                  \
    }

FOR_WIDTH(8)
FOR_WIDTH(16)
FOR_WIDTH(32)
FOR_WIDTH(64)
