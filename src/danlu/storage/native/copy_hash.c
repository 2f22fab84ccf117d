/* Copy memory and take its crc32c (RFC 3720) on the way, in one pass.
 *
 * The instruction that folds eight bytes into a crc takes one cycle but answers after three, so three stretches of a
 * block are folded side by side and their sums joined: the crc of A then B is crc(A) carried over |B| zero bytes, xor
 * crc(B). Carrying over a fixed number of zeros is a linear map of 32 bits, kept as four tables of 256.
 *
 * danlu_init builds the tables and must be called once before anything else. All other functions may be called from
 * any thread. A crc goes in and comes out as the finished value, so that pieces can be chained: start with 0. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__SSE4_2__)
#include <immintrin.h>
#define DANLU_HAS_CRC 1
static inline uint64_t fold8(uint64_t crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
static inline uint64_t fold1(uint64_t crc, uint8_t byte) { return _mm_crc32_u8((uint32_t)crc, byte); }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define DANLU_HAS_CRC 1
static inline uint64_t fold8(uint64_t crc, uint64_t word) { return __crc32cd((uint32_t)crc, word); }
static inline uint64_t fold1(uint64_t crc, uint8_t byte) { return __crc32cb((uint32_t)crc, byte); }
#endif

int danlu_supported(void) {
#ifdef DANLU_HAS_CRC
    return 1;
#else
    return 0;
#endif
}

#ifdef DANLU_HAS_CRC

#define POLYNOMIAL 0x82F63B78u /* Castagnoli, lowest bit first */
#define STRETCH 1024u          /* bytes a stretch; a block is three of them */
#define BLOCK (3u * STRETCH)
#define STREAMING (1u << 20) /* from here the target would only push other data out of the cache */
#define AHEAD 2048u          /* bytes between the load of a line and its prefetch */

static uint32_t over_one[4][256]; /* carry a crc over one stretch of zeros */
static uint32_t over_two[4][256];

static uint32_t over_zeros(uint32_t crc, size_t zeros) {
    while (zeros--)
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (POLYNOMIAL & (0u - (crc & 1u)));
    return crc;
}

static void fill(uint32_t table[4][256], size_t zeros) {
    uint32_t column[32];
    for (int bit = 0; bit < 32; bit++) column[bit] = over_zeros(1u << bit, zeros);
    for (int lane = 0; lane < 4; lane++)
        for (int value = 0; value < 256; value++) {
            uint32_t sum = 0;
            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1) sum ^= column[8 * lane + bit];
            table[lane][value] = sum;
        }
}

void danlu_init(void) {
    fill(over_one, STRETCH);
    fill(over_two, 2 * STRETCH);
}

static inline uint64_t carry(uint32_t table[4][256], uint64_t crc) {
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24 & 255];
}

static inline uint64_t join(uint64_t first, uint64_t second, uint64_t third) {
    return carry(over_two, first) ^ carry(over_one, second) ^ third;
}

static inline uint64_t word_at(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

/* One line of 64 bytes past the cache. The target is aligned; the source need not be. */
static inline void put_line(uint8_t *target, const uint8_t *source) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)target, _mm512_loadu_si512(source));
#elif defined(__AVX2__)
    __m256i low = _mm256_loadu_si256((const void *)source), high = _mm256_loadu_si256((const void *)(source + 32));
    _mm256_stream_si256((void *)target, low);
    _mm256_stream_si256((void *)(target + 32), high);
#elif defined(__x86_64__)
    for (int part = 0; part < 64; part += 16)
        _mm_stream_si128((void *)(target + part), _mm_loadu_si128((const void *)(source + part)));
#else
    memcpy(target, source, 64);
#endif
}

static inline void fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static uint64_t copy_plain(uint64_t crc, uint8_t *target, const uint8_t *source, size_t length) {
    for (; length >= 8; length -= 8, source += 8, target += 8) {
        uint64_t word = word_at(source);
        memcpy(target, &word, 8);
        crc = fold8(crc, word);
    }
    for (; length; length--) {
        uint8_t byte = *source++;
        *target++ = byte;
        crc = fold1(crc, byte);
    }
    return crc;
}

/* A block in the cache's good order: memory likes one stream, the instruction likes three. So the block is brought in
 * line by line, written out line by line, and folded from the first cache in three stretches. */
static uint64_t copy_block(uint64_t crc, uint8_t *target, const uint8_t *source, int streaming) {
    uint64_t second = 0, third = 0;
    for (size_t at = 0; at < STRETCH; at += 64) {
        const uint8_t *line = source + at;
        if (streaming) {
            for (int part = 0; part < 3; part++) __builtin_prefetch(source + AHEAD + 3 * at + 64 * part + BLOCK, 0, 3);
            for (int part = 0; part < 3; part++) put_line(target + 3 * at + 64 * part, source + 3 * at + 64 * part);
        } else {
            for (int part = 0; part < 3; part++) memcpy(target + 3 * at + 64 * part, source + 3 * at + 64 * part, 64);
        }
        for (int byte = 0; byte < 64; byte += 8) {
            crc = fold8(crc, word_at(line + byte));
            second = fold8(second, word_at(line + STRETCH + byte));
            third = fold8(third, word_at(line + 2 * STRETCH + byte));
        }
    }
    return join(crc, second, third);
}

uint32_t danlu_copy_crc32c(uint32_t start, uint8_t *target, const uint8_t *source, size_t length) {
    uint64_t crc = (uint32_t)~start;
    int streaming = length >= STREAMING;
    if (streaming) {
        size_t head = (0 - (uintptr_t)target) & 63;
        crc = copy_plain(crc, target, source, head);
        target += head, source += head, length -= head;
    }
    for (; length >= BLOCK; length -= BLOCK, target += BLOCK, source += BLOCK)
        crc = copy_block(crc, target, source, streaming);
    crc = copy_plain(crc, target, source, length);
    if (streaming) fence();
    return (uint32_t)~crc;
}

uint32_t danlu_crc32c(uint32_t start, const uint8_t *data, size_t length) {
    uint64_t crc = (uint32_t)~start;
    for (; length >= BLOCK; length -= BLOCK, data += BLOCK) {
        uint64_t second = 0, third = 0;
        for (size_t at = 0; at < STRETCH; at += 8) {
            crc = fold8(crc, word_at(data + at));
            second = fold8(second, word_at(data + STRETCH + at));
            third = fold8(third, word_at(data + 2 * STRETCH + at));
        }
        crc = join(crc, second, third);
    }
    for (; length >= 8; length -= 8, data += 8) crc = fold8(crc, word_at(data));
    for (; length; length--) crc = fold1(crc, *data++);
    return (uint32_t)~crc;
}

#endif
