/* For checkpoint fingerprints: weighted sums of rows, and whether an element is not finite.
 *
 * One function for each width of an element. Both loops are simple so that the compiler vectorizes them, once for each
 * kind of vectors; which of them this processor has is asked when they run. Unsigned sums wrap around at 2^64, and so do
 * not depend on the order of additions. Four rows at once keep memory busy: a single row was read at 5.5 GB/s on a Xeon
 * of 2023, four at 9. */

#include <stddef.h>
#include <stdint.h>

#ifndef CPU_HAS /* a test compiles it for less than this processor has */
#define CPU_HAS(feature) __builtin_cpu_supports(feature)
#endif

#define STRETCH 4096 /* elements checked before deciding whether to continue */

#define ROW_SUMS(name, bits)                                                                                       \
    void name(const uint##bits##_t *rows, size_t stride, size_t count, size_t width, const uint64_t *weights,      \
              uint64_t scale, uint64_t *sums)
#define ANY_WITH(name, bits) int name(const uint##bits##_t *elements, size_t count, uint64_t mask)

/* sums[row] += scale * (rows[row][0] * weights[0] + rows[row][1] * weights[1] + …); rows lie `stride` elements apart.
 * Whether any element has all bits of `mask` set: in a float, the exponent bits of a non-finite number. */
#define FOR_VECTORS(bits, vectors, attributes)                                                                     \
    attributes static ROW_SUMS(row_sums_##bits##_##vectors, bits) {                                                \
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
    attributes static ANY_WITH(any_with_##bits##_##vectors, bits) {                                                \
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

#if defined(__x86_64__)
#define EVERY_VECTORS(bits)                                                                                        \
    FOR_VECTORS(bits, plain, )                                                                                     \
    FOR_VECTORS(bits, avx2, __attribute__((target("avx2"))))                                                       \
    FOR_VECTORS(bits, avx512, __attribute__((target("avx512bw,avx512dq"))))
#define WIDEST(function)                                                                                           \
    (CPU_HAS("avx512bw") && CPU_HAS("avx512dq") ? function##_avx512 : CPU_HAS("avx2") ? function##_avx2             \
                                                                                       : function##_plain)
#else
#define EVERY_VECTORS(bits) FOR_VECTORS(bits, plain, )
#define WIDEST(function) function##_plain
#endif

#define FOR_WIDTH(bits)                                                                                            \
    EVERY_VECTORS(bits)                                                                                            \
    ROW_SUMS(danlu_add_row_sums_##bits, bits) {                                                                    \
        WIDEST(row_sums_##bits)(rows, stride, count, width, weights, scale, sums);                                 \
    }                                                                                                              \
    ANY_WITH(danlu_any_with_##bits, bits) { return WIDEST(any_with_##bits)(elements, count, mask); }

FOR_WIDTH(8)
FOR_WIDTH(16)
FOR_WIDTH(32)
FOR_WIDTH(64)
