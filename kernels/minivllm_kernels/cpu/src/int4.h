// Four-bit weights: w = step * u + least, u in 0..15, step and least one half float each per channel and 32 values of k. The
// form of GGUF's Q4_1, whose weights are kept exactly; five bits a weight, for when reading weights is all the time there is.
//
// Packed: panels of 32 channels, per group of 32 k: 32 steps, 32 leasts (half floats), then four times two lines of 64 bytes,
// channels 0-15 and 16-31; the low nibbles hold four k of sixteen channels, the high nibbles the next four. 640 bytes a group.
#pragma once
#include "dot.h"

constexpr int GROUP4 = 32;
constexpr int GROUP4_BYTES = 640;
constexpr int TILE_INT4 = VECTOR_BYTES == 64 ? 4 : 1;

struct F16 {  // IEEE half
  uint16_t bits;
};

#if VECTOR_BYTES == 16 && !defined(__aarch64__)
static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  uint32_t bits;
  if (exponent == 31) bits = 0x7f800000 | fraction << 13;
  else if (exponent) bits = (exponent + 112) << 23 | fraction << 13;
  else {
    const float tiny = (float)fraction * 0x1p-24f;
    memcpy(&bits, &tiny, 4);
  }
  bits |= sign;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
#endif
static INLINE f32x16 load(const F16 *p) {
#if VECTOR_BYTES == 64
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VECTOR_BYTES == 32
  return {(f32s)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), (f32s)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))};
#elif defined(__aarch64__)
  const float16_t *h = (const float16_t *)p;
  return {{(f32s)vcvt_f32_f16(vld1_f16(h)), (f32s)vcvt_f32_f16(vld1_f16(h + 4))},
          {(f32s)vcvt_f32_f16(vld1_f16(h + 8)), (f32s)vcvt_f32_f16(vld1_f16(h + 12))}};
#else
  float wide[16];
  for (int i = 0; i < 16; i++) wide[i] = half_to_float(p[i].bits);
  return load(wide);
#endif
}

// A line of 64 bytes as two sets of weights for dot4. They are within 0..15, so signed and unsigned are the same: sums start at 0.
static INLINE void split_nibbles(const uint8_t *p, weights64 &low, weights64 &high) {
#if VECTOR_BYTES == 64
  const __m512i x = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = _mm512_and_si512(x, mask);
  high = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
#elif VECTOR_BYTES == 32
  const __m256i mask = _mm256_set1_epi8(15);
  for (int i = 0; i < 2; i++) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)(p + 32 * i));
    low.h[i] = _mm256_and_si256(x, mask);
    high.h[i] = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
  }
#elif defined(__aarch64__)
  for (int i = 0; i < 4; i++) {
    const uint8x16_t x = vld1q_u8(p + 16 * i);
    low.q[i] = vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15)));
    high.q[i] = vreinterpretq_s8_u8(vshrq_n_u8(x, 4));
  }
#else
  for (int i = 0; i < 64; i++) low.w[i] = p[i] & 15, high.w[i] = p[i] >> 4;
#endif
}

// M rows x 32 channels over the whole depth. `fix` is -128 * the sum of a group's bytes, as for int8.
template <int M>
static INLINE void tile_int4(const int8_t *q, const float *scale, const int32_t *fix, int depth, const uint8_t *w,
                             const char *ahead, int lines, f32x16 (&sum)[M][2]) {
  const int groups = depth / GROUP4;
  for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = f32x16{};
  for (int g = 0; g < groups; g++) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(ahead + 64 * i, 0, 3);
    i32x16 part[M][2];
    for (int m = 0; m < M; m++) part[m][0] = part[m][1] = splat_i32(0);
    const F16 *steps = (const F16 *)w, *leasts = steps + 32;
    const uint8_t *lines_of = w + 128;
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      weights64 low0, high0, low1, high1;
      split_nibbles(lines_of + 128 * k, low0, high0);
      split_nibbles(lines_of + 128 * k + 64, low1, high1);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        int32_t first, second;
        memcpy(&first, q + (size_t)m * depth + 8 * k, 4);
        memcpy(&second, q + (size_t)m * depth + 8 * k + 4, 4);
        part[m][0] = dot4(dot4(part[m][0], low0, first), high0, second);
        part[m][1] = dot4(dot4(part[m][1], low1, first), high1, second);
      }
    }
    const f32x16 step0 = load(steps), step1 = load(steps + 16), least0 = load(leasts), least1 = load(leasts + 16);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const float s = scale[m * groups + g];
      const f32x16 by = splat(s), total = splat(s * (float)(fix[m * groups + g] / -128));
      sum[m][0] = fma(least0, total, fma(to_float(part[m][0]), step0 * by, sum[m][0]));
      sum[m][1] = fma(least1, total, fma(to_float(part[m][1]), step1 * by, sum[m][1]));
    }
    q += GROUP4;
    w += GROUP4_BYTES;
    ahead += lines * 64;
  }
}
