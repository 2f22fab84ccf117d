/* Operators of a training step on a CPU, each in one pass over memory: norm, gated activation, rotation, cross-entropy.
 *
 * PyTorch's eager operators read and write a tensor once per elementary operation, and convert bf16 to fp32 and back in
 * passes of their own. Here a block of a row is converted to fp32 in the first cache, everything is computed there, and
 * it is written once. Sums are fp32, of blocks, and a row's is the sum of its blocks'.
 *
 * Rows are divided over `threads` by OpenMP, whose threads are torch's own: its library is loaded before. Every kernel
 * is compiled for several generations of x86 and chosen when the library is loaded. dtype: 0 is fp32, 1 is bf16. What is
 * not a number stays that, and infinity becomes what the formulas make of it. Functions may be called from any thread.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_dtypes.h"

#define BLOCK 512 /* features that are in fp32 at once: several blocks fit the first cache */
#define EACH_BLOCK(at, size, width) \
    for (int64_t at = 0, size; at < (width) && (size = (width) - at < BLOCK ? (width) - at : BLOCK); at += BLOCK)
/* Divide rows evenly, and call with each thread's `begin` and `end`. */
#define OVER_THREADS(rows, call)                                              \
    _Pragma("omp parallel for num_threads(threads) schedule(static)")         \
    for (int thread = 0; thread < threads; thread++) {                        \
        int64_t begin = (rows) * thread / threads, end = (rows) * (thread + 1) / threads; \
        call;                                                                 \
    }

/* e^x within 1.5 units in the last place, without a branch: 2^n times a polynomial of what remains (Cody and Waite). */
INLINE float exp_fast(float x) {
    float bounded = x > 88.72283f ? 88.72283f : (x < -87.33654f ? -87.33654f : x); /* keeps what is not a number */
    float n = rintf(bounded * 1.44269504f);
    float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    /* 2^n in two factors: n is 128 at the upper end, which one exponent cannot hold. */
    int32_t half = (int32_t)n / 2, rest = (int32_t)n - half;
    float made = p * from_bits((uint32_t)(half + 127) << 23) * from_bits((uint32_t)(rest + 127) << 23);
    made = x > 88.72283f ? INFINITY : made;
    return x < -87.33654f ? 0.0f : made;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

/* ---- RMS norm: y = x · rstd · (weight + center), rstd = 1 / sqrt(mean(x²) + eps) ---- */

KERNEL void rms_norm_rows(const void *x, const float *scale, void *y, float *rstd, int64_t begin, int64_t end,
                          int64_t width, float eps, int dtype) {
    float buffer[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        float squares = 0;
        EACH_BLOCK(at, size, width) {
            load(buffer, x, row * width + at, size, dtype);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++) sum += buffer[i] * buffer[i];
            squares += sum;
        }
        float factor = 1.0f / sqrtf(squares / (float)width + eps);
        rstd[row] = factor;
        EACH_BLOCK(at, size, width) {
            load(buffer, x, row * width + at, size, dtype);
            for (int64_t i = 0; i < size; i++) buffer[i] = buffer[i] * factor * scale[at + i];
            store(y, row * width + at, buffer, size, dtype);
        }
    }
}

void danlu_rms_norm(const void *x, const float *scale, void *y, float *rstd, int64_t rows, int64_t width, float eps,
                    int dtype, int threads) {
    OVER_THREADS(rows, rms_norm_rows(x, scale, y, rstd, begin, end, width, eps, dtype))
}

/* Gradient of x, and of the scale summed over these rows into `scale_gradient`, which is zero before. */
KERNEL void rms_norm_backward_rows(const void *gradient, const void *x, const float *scale, const float *rstd,
                                   void *x_gradient, float *scale_gradient, int64_t begin, int64_t end, int64_t width,
                                   int dtype) {
    float normed[BLOCK], given[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        float factor = rstd[row], along = 0;
        EACH_BLOCK(at, size, width) {
            load(normed, x, row * width + at, size, dtype);
            load(given, gradient, row * width + at, size, dtype);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++) {
                float here = normed[i] * factor;
                scale_gradient[at + i] += given[i] * here;
                sum += given[i] * scale[at + i] * here;
            }
            along += sum;
        }
        along /= (float)width;
        EACH_BLOCK(at, size, width) {
            load(normed, x, row * width + at, size, dtype);
            load(given, gradient, row * width + at, size, dtype);
            for (int64_t i = 0; i < size; i++)
                given[i] = (given[i] * scale[at + i] - normed[i] * factor * along) * factor;
            store(x_gradient, row * width + at, given, size, dtype);
        }
    }
}

/* `scale_gradients`: one row of `width` per thread, all zero before; their sum is the gradient. */
void danlu_rms_norm_backward(const void *gradient, const void *x, const float *scale, const float *rstd,
                             void *x_gradient, float *scale_gradients, int64_t rows, int64_t width, int dtype,
                             int threads) {
    OVER_THREADS(rows, rms_norm_backward_rows(gradient, x, scale, rstd, x_gradient, scale_gradients + thread * width,
                                              begin, end, width, dtype))
}

/* ---- Gated activation: y = act(gate) · up ---- */

enum { SWIGLU, GEGLU, CLAMPED_SWIGLU };

/* The activation of `gate`, and its derivative there. */
INLINE float activate(float gate, float *slope, int kind) {
    if (kind == GEGLU) { /* 0.5 x (1 + tanh(u)) is x · sigmoid(2u) */
        float cubed = 0.044715f * gate * gate * gate;
        float share = sigmoid(1.5957691216f * (gate + cubed));
        *slope = share + gate * share * (1 - share) * 1.5957691216f * (1.0f + 0.134145f * gate * gate);
        return gate * share;
    }
    float steepness = kind == CLAMPED_SWIGLU ? 1.702f : 1.0f;
    float share = sigmoid(gate * steepness);
    *slope = share + gate * steepness * share * (1 - share);
    return gate * share;
}

INLINE void gated_block(const float *gate, const float *up, float *y, int64_t size, int kind) {
    float slope;
    for (int64_t i = 0; i < size; i++) {
        float g = gate[i], u = up[i];
        if (kind == CLAMPED_SWIGLU) {
            g = g > 7.0f ? 7.0f : g;
            u = u > 7.0f ? 7.0f : (u < -7.0f ? -7.0f : u);
            y[i] = (u + 1.0f) * activate(g, &slope, kind);
        } else {
            y[i] = u * activate(g, &slope, kind);
        }
    }
}

INLINE void gated_backward_block(float *gate, float *up, const float *given, int64_t size, int kind) {
    for (int64_t i = 0; i < size; i++) {
        float g = gate[i], u = up[i], slope;
        if (kind == CLAMPED_SWIGLU) {
            float g_kept = g > 7.0f ? 0.0f : 1.0f, u_kept = u > 7.0f || u < -7.0f ? 0.0f : 1.0f;
            g = g > 7.0f ? 7.0f : g;
            u = u > 7.0f ? 7.0f : (u < -7.0f ? -7.0f : u);
            float made = activate(g, &slope, kind);
            gate[i] = given[i] * (u + 1.0f) * slope * g_kept;
            up[i] = given[i] * made * u_kept;
        } else {
            float made = activate(g, &slope, kind);
            gate[i] = given[i] * u * slope;
            up[i] = given[i] * made;
        }
    }
}

KERNEL void gated_rows(const void *gate, const void *up, void *y, int64_t begin, int64_t end, int kind, int dtype) {
    float g[BLOCK], u[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t size = end - at < BLOCK ? end - at : BLOCK;
        load(g, gate, at, size, dtype);
        load(u, up, at, size, dtype);
        if (kind == SWIGLU) gated_block(g, u, u, size, SWIGLU); /* a loop of each kind, without a test inside */
        else if (kind == GEGLU) gated_block(g, u, u, size, GEGLU);
        else gated_block(g, u, u, size, CLAMPED_SWIGLU);
        store(y, at, u, size, dtype);
    }
}

void danlu_gated(const void *gate, const void *up, void *y, int64_t elements, int64_t kind, int dtype,
                 int threads) {
    OVER_THREADS(elements, gated_rows(gate, up, y, begin, end, (int)kind, dtype))
}

KERNEL void gated_backward_rows(const void *gradient, const void *gate, const void *up, void *gate_gradient,
                                void *up_gradient, int64_t begin, int64_t end, int kind, int dtype) {
    float given[BLOCK], g[BLOCK], u[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t size = end - at < BLOCK ? end - at : BLOCK;
        load(given, gradient, at, size, dtype);
        load(g, gate, at, size, dtype);
        load(u, up, at, size, dtype);
        if (kind == SWIGLU) gated_backward_block(g, u, given, size, SWIGLU);
        else if (kind == GEGLU) gated_backward_block(g, u, given, size, GEGLU);
        else gated_backward_block(g, u, given, size, CLAMPED_SWIGLU);
        store(gate_gradient, at, g, size, dtype);
        store(up_gradient, at, u, size, dtype);
    }
}

void danlu_gated_backward(const void *gradient, const void *gate, const void *up, void *gate_gradient,
                          void *up_gradient, int64_t elements, int64_t kind, int dtype, int threads) {
    OVER_THREADS(elements,
                 gated_backward_rows(gradient, gate, up, gate_gradient, up_gradient, begin, end, (int)kind, dtype))
}

/* ---- Rotation: halves (a, b) of a head's features become (a cos - b sin, b cos + a sin) ---- */

/* A row is one token: `heads` of `2 * half` features. Tables have a row of `half` per position; the position of token
 * `row` is row % positions. `direction` is -1 for the gradient. */
KERNEL void rotate_rows(const void *x, const float *cosines, const float *sines, void *y, int64_t begin, int64_t end,
                        int64_t positions, int64_t heads, int64_t half, float direction, int dtype) {
    float a[BLOCK], b[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        const float *c = cosines + row % positions * half, *s = sines + row % positions * half;
        for (int64_t head = 0; head < heads; head++) {
            int64_t place = (row * heads + head) * 2 * half;
            EACH_BLOCK(at, size, half) {
                load(a, x, place + at, size, dtype);
                load(b, x, place + half + at, size, dtype);
                for (int64_t i = 0; i < size; i++) {
                    float sine = direction * s[at + i], first = a[i], second = b[i];
                    a[i] = first * c[at + i] - second * sine;
                    b[i] = second * c[at + i] + first * sine;
                }
                store(y, place + at, a, size, dtype);
                store(y, place + half + at, b, size, dtype);
            }
        }
    }
}

void danlu_rotate(const void *x, const float *cosines, const float *sines, void *y, int64_t rows, int64_t positions,
                  int64_t heads, int64_t half, float direction, int dtype, int threads) {
    OVER_THREADS(rows, rotate_rows(x, cosines, sines, y, begin, end, positions, heads, half, direction, dtype))
}

/* ---- Cross-entropy of rows of logits ---- */

/* The highest logit of a row, the sum of exp(logit - highest), and the logit at its target, if `first` <= target. */
KERNEL void softmax_sums_rows(const void *logits, const int64_t *targets, float *highest, float *sums, float *at_target,
                              int64_t begin, int64_t end, int64_t width, int64_t first, int dtype) {
    float buffer[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        /* One pass: each block's highest first, and the sum so far is brought to it. */
        float top = -INFINITY, total = 0;
        EACH_BLOCK(at, size, width) {
            load(buffer, logits, row * width + at, size, dtype);
            float block_top = buffer[0];
            for (int64_t i = 1; i < size; i++) block_top = buffer[i] > block_top ? buffer[i] : block_top;
            float higher = block_top > top ? block_top : top, sum = 0;
            float base = higher == -INFINITY ? 0.0f : higher; /* nothing but -inf so far: they add 0 */
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++) sum += exp_fast(buffer[i] - base);
            total = total * exp_fast(top - base) + sum;
            top = higher;
        }
        highest[row] = top;
        sums[row] = total;
        int64_t column = targets[row] - first;
        float value = 0;
        if (column >= 0 && column < width) load(&value, logits, row * width + column, 1, dtype);
        at_target[row] = value;
    }
}

void danlu_softmax_sums(const void *logits, const int64_t *targets, float *highest, float *sums, float *at_target,
                        int64_t rows, int64_t width, int64_t first, int dtype, int threads) {
    OVER_THREADS(rows, softmax_sums_rows(logits, targets, highest, sums, at_target, begin, end, width, first, dtype))
}

/* (softmax - one at the target) · factor; zero where the factor is. Not through the logarithm of the sum, which costs a
 * large logit digits. */
KERNEL void cross_entropy_backward_rows(const void *logits, const int64_t *targets, const float *highest,
                                        const float *sums, const float *factors, void *gradient, int64_t begin,
                                        int64_t end, int64_t width, int64_t first, int dtype) {
    float buffer[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        float top = highest[row], factor = factors[row], share = factor / sums[row];
        int64_t column = targets[row] - first;
        EACH_BLOCK(at, size, width) {
            load(buffer, logits, row * width + at, size, dtype);
            if (factor == 0) memset(buffer, 0, 4 * size);
            else for (int64_t i = 0; i < size; i++) buffer[i] = exp_fast(buffer[i] - top) * share;
            if (column >= at && column < at + size) buffer[column - at] -= factor;
            store(gradient, row * width + at, buffer, size, dtype);
        }
    }
}

void danlu_cross_entropy_backward(const void *logits, const int64_t *targets, const float *highest, const float *sums,
                                  const float *factors, void *gradient, int64_t rows, int64_t width, int64_t first,
                                  int dtype, int threads) {
    OVER_THREADS(rows, cross_entropy_backward_rows(logits, targets, highest, sums, factors, gradient, begin, end, width,
                                                   first, dtype))
}
