/* Multiply bytes by a constant in GF(2^8) and add (xor) the products to a sum.
 *
 * A product is linear, so that of a byte is the xor of those of its two halves: two tables of 16 per constant, which a
 * vector instruction looks up for 16, 32 or 64 bytes at once. `table` holds the products of 0..15, then of the same
 * shifted left by four. Which vectors this processor has is asked when it runs. */

#include <stddef.h>
#include <stdint.h>

#ifndef CPU_HAS /* a test compiles it for less than this processor has */
#define CPU_HAS(feature) __builtin_cpu_supports(feature)
#endif

typedef size_t kernel(uint8_t *sum, const uint8_t *data, const uint8_t *table, size_t length);

/* Each does as many bytes as its vectors fit into, and returns how many. */
#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512bw"))) static size_t by_64(uint8_t *sum, const uint8_t *data, const uint8_t *table,
                                                        size_t length) {
    size_t at = 0;
    const __m512i low = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
    const __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(table + 16)));
    const __m512i half = _mm512_set1_epi8(15);
    for (; at + 64 <= length; at += 64) {
        __m512i bytes = _mm512_loadu_si512(data + at);
        __m512i first = _mm512_shuffle_epi8(low, _mm512_and_si512(bytes, half));
        __m512i second = _mm512_shuffle_epi8(high, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), half));
        __m512i before = _mm512_loadu_si512(sum + at);
        _mm512_storeu_si512(sum + at, _mm512_xor_si512(before, _mm512_xor_si512(first, second)));
    }
    return at;
}

__attribute__((target("avx2"))) static size_t by_32(uint8_t *sum, const uint8_t *data, const uint8_t *table,
                                                    size_t length) {
    size_t at = 0;
    const __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(table + 16)));
    const __m256i half = _mm256_set1_epi8(15);
    for (; at + 32 <= length; at += 32) {
        __m256i bytes = _mm256_loadu_si256((const void *)(data + at));
        __m256i first = _mm256_shuffle_epi8(low, _mm256_and_si256(bytes, half));
        __m256i second = _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), half));
        __m256i before = _mm256_loadu_si256((const void *)(sum + at));
        _mm256_storeu_si256((void *)(sum + at), _mm256_xor_si256(before, _mm256_xor_si256(first, second)));
    }
    return at;
}

__attribute__((target("ssse3"))) static size_t by_16(uint8_t *sum, const uint8_t *data, const uint8_t *table,
                                                     size_t length) {
    size_t at = 0;
    const __m128i low = _mm_loadu_si128((const void *)table), high = _mm_loadu_si128((const void *)(table + 16));
    const __m128i half = _mm_set1_epi8(15);
    for (; at + 16 <= length; at += 16) {
        __m128i bytes = _mm_loadu_si128((const void *)(data + at));
        __m128i first = _mm_shuffle_epi8(low, _mm_and_si128(bytes, half));
        __m128i second = _mm_shuffle_epi8(high, _mm_and_si128(_mm_srli_epi16(bytes, 4), half));
        __m128i before = _mm_loadu_si128((const void *)(sum + at));
        _mm_storeu_si128((void *)(sum + at), _mm_xor_si128(before, _mm_xor_si128(first, second)));
    }
    return at;
}
#elif defined(__aarch64__)
#include <arm_neon.h>

static size_t by_16(uint8_t *sum, const uint8_t *data, const uint8_t *table, size_t length) {
    size_t at = 0;
    const uint8x16_t low = vld1q_u8(table), high = vld1q_u8(table + 16), half = vdupq_n_u8(15);
    for (; at + 16 <= length; at += 16) {
        uint8x16_t bytes = vld1q_u8(data + at);
        uint8x16_t first = vqtbl1q_u8(low, vandq_u8(bytes, half));
        uint8x16_t second = vqtbl1q_u8(high, vshrq_n_u8(bytes, 4));
        vst1q_u8(sum + at, veorq_u8(vld1q_u8(sum + at), veorq_u8(first, second)));
    }
    return at;
}
#endif

static kernel *widest(void) {
#if defined(__x86_64__)
    if (CPU_HAS("avx512bw")) return by_64;
    if (CPU_HAS("avx2")) return by_32;
    if (CPU_HAS("ssse3")) return by_16;
#elif defined(__aarch64__)
    return by_16;
#endif
    return 0;
}

void danlu_multiply_add(uint8_t *sum, const uint8_t *data, const uint8_t *table, size_t length) {
    kernel *vectors = widest();
    size_t at = vectors ? vectors(sum, data, table, length) : 0;
    for (; at < length; at++) sum[at] ^= table[data[at] & 15] ^ table[16 + (data[at] >> 4)];
}
