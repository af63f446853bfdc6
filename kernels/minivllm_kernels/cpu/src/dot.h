// Sums of four products of bytes, sixteen at a time: the heart of the int8 matrix product.
//
// Weights are stored as w + 128 (unsigned), activations as signed bytes, both within -127..127. Machines with an unsigned x
// signed instruction take them as they are and start from `correction` = -128 * sum(activations); the others take the sign bit
// off the weights first and start from 0. Integers, so the result is the same to the last bit.
#pragma once
#include "vec.h"

typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef u8x64 u8x64_any __attribute__((aligned(1), may_alias));

#if defined(__AVX512VNNI__)
#define ISA_NAME "avx512vnni"
#define DOT_TAKES_UNSIGNED 1
#elif defined(__AVXVNNI__)
#define ISA_NAME "avxvnni"
#define DOT_TAKES_UNSIGNED 1
#elif defined(__AVX2__)
#define ISA_NAME "avx2"
#define DOT_TAKES_UNSIGNED 0
#elif defined(__ARM_FEATURE_DOTPROD)
#define ISA_NAME "sdot"
#define DOT_TAKES_UNSIGNED 0
#else
#define ISA_NAME "scalar"
#define DOT_TAKES_UNSIGNED 0
#endif

typedef u8x64 weights64;  // four bytes for each of sixteen channels

static INLINE i32x16 dot_start(int32_t correction) { return splat_i32(DOT_TAKES_UNSIGNED ? correction : 0); }

static INLINE weights64 load_weights(const uint8_t *p) {
  weights64 w = *(const u8x64_any *)p;
#if !DOT_TAKES_UNSIGNED
  w ^= 0x80;  // signed again
#endif
  return w;
}

// accumulator[channel] += sum over i of weight[channel][i] * activation[i], the four activations packed into one integer.
static INLINE i32x16 dot4(i32x16 accumulator, weights64 w, int32_t activations) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)accumulator, (__m512i)w, _mm512_set1_epi32(activations));
#elif defined(__AVX2__)
  union { i32x16 v; __m256i h[2]; } a{accumulator};
  union { weights64 v; __m256i h[2]; } x{w};
  const __m256i q = _mm256_set1_epi32(activations);
  for (int i = 0; i < 2; i++) {
#if defined(__AVXVNNI__)
    a.h[i] = _mm256_dpbusd_avx_epi32(a.h[i], x.h[i], q);
#else
    // |w| x (q with w's sign): pairs reach at most 2 * 127 * 127, which sixteen bits hold.
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x.h[i]), _mm256_sign_epi8(q, x.h[i]));
    a.h[i] = _mm256_add_epi32(a.h[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
  return a.v;
#elif defined(__ARM_FEATURE_DOTPROD)
  union { i32x16 v; int32x4_t q[4]; } a{accumulator};
  union { weights64 v; int8x16_t q[4]; } x{w};
  const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(activations));
  for (int i = 0; i < 4; i++) a.q[i] = vdotq_s32(a.q[i], x.q[i], q);
  return a.v;
#else
  int8_t q[4];
  memcpy(q, &activations, 4);
  for (int c = 0; c < 16; c++)
    for (int i = 0; i < 4; i++) accumulator[c] += (int8_t)w[4 * c + i] * q[i];
  return accumulator;
#endif
}
