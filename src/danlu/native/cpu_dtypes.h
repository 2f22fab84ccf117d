/* Blocks of fp32 and bf16 tensors as fp32, and back; how a function is compiled for several generations of x86. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define KERNEL static __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define KERNEL static
#endif
#define INLINE static inline __attribute__((always_inline))

enum { FP32, BF16 };

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE void load(float *to, const void *tensor, int64_t at, int64_t size, int dtype) {
    if (dtype == BF16) {
        const uint16_t *from = (const uint16_t *)tensor + at;
        for (int64_t i = 0; i < size; i++) to[i] = from_bits((uint32_t)from[i] << 16);
    } else {
        memcpy(to, (const float *)tensor + at, 4 * size);
    }
}

/* Rounds to the nearest bf16, ties to even, as torch does. */
INLINE void store(void *tensor, int64_t at, const float *from, int64_t size, int dtype) {
    if (dtype == BF16) {
        uint16_t *to = (uint16_t *)tensor + at;
        for (int64_t i = 0; i < size; i++) {
            uint32_t bits = to_bits(from[i]);
            uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
            to[i] = (uint16_t)(from[i] != from[i] ? 0x7FC0u : rounded);
        }
    } else {
        memcpy((float *)tensor + at, from, 4 * size);
    }
}
