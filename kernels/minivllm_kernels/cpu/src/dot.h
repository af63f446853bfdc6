// The hearts of the matrix products, sixteen channels at a time: sums of four products of bytes, of two of bfloat16 numbers, or of
// one of floats.
//
// Bytes: weights are stored as w + 128 (unsigned), activations as signed bytes, both within -127..127. Machines with an unsigned x
// signed instruction take them as they are and start from `correction` = -128 * sum(activations); the others take the sign bit
// off the weights first and start from 0. Integers, so the result is the same to the last bit.
#pragma once
#include "vec.h"

#if VECTOR_BYTES == 64 && defined(__AVX512VNNI__) && defined(__AVX512BF16__) && !defined(SPLIT_PAIRS)
#define ISA_NAME "avx512bf16"
#define DOT_TAKES_UNSIGNED 1
#define DOT_TAKES_PAIRS 1
#elif VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
#define ISA_NAME "avx512vnni"
#define DOT_TAKES_UNSIGNED 1
#elif VECTOR_BYTES == 64
#define ISA_NAME "avx512"
#define DOT_TAKES_UNSIGNED 0
#elif VECTOR_BYTES == 32 && defined(__AVXVNNI__)
#define ISA_NAME "avxvnni"
#define DOT_TAKES_UNSIGNED 1
#elif VECTOR_BYTES == 32
#define ISA_NAME "avx2"
#define DOT_TAKES_UNSIGNED 0
#elif defined(__ARM_FEATURE_DOTPROD)
#define ISA_NAME "sdot"
#define DOT_TAKES_UNSIGNED 0
#elif defined(__aarch64__)
#define ISA_NAME "neon"
#define DOT_TAKES_UNSIGNED 0
#else
#define ISA_NAME "scalar"
#define DOT_TAKES_UNSIGNED 0
#endif

#if VECTOR_BYTES == 64
typedef __m512i weights64;  // four bytes for each of sixteen channels
#elif VECTOR_BYTES == 32
struct weights64 {
  __m256i h[2];
};
#elif defined(__aarch64__)
struct weights64 {
  int8x16_t q[4];
};
#else
struct weights64 {
  int8_t w[64];
};
#endif

static INLINE i32x16 dot_start(int32_t correction) { return splat_i32(DOT_TAKES_UNSIGNED ? correction : 0); }

static INLINE weights64 load_weights(const uint8_t *p) {
#if VECTOR_BYTES == 64
  const __m512i w = _mm512_loadu_si512(p);
  return DOT_TAKES_UNSIGNED ? w : _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80));
#elif VECTOR_BYTES == 32
  weights64 w{{_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))}};
#if !DOT_TAKES_UNSIGNED
  const __m256i sign = _mm256_set1_epi8((char)0x80);
  w = {{_mm256_xor_si256(w.h[0], sign), _mm256_xor_si256(w.h[1], sign)}};
#endif
  return w;
#elif defined(__aarch64__)
  const uint8x16_t sign = vdupq_n_u8(0x80);
  weights64 w;
  for (int i = 0; i < 4; i++) w.q[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), sign));
  return w;
#else
  weights64 w;
  for (int i = 0; i < 64; i++) w.w[i] = (int8_t)(p[i] ^ 0x80);
  return w;
#endif
}

// accumulator[channel] += sum over i of weight[channel][i] * activation[i], the four activations packed into one integer.
#if VECTOR_BYTES == 64
static INLINE i32x16 dot4(i32x16 accumulator, weights64 w, int32_t activations) {
  const __m512i q = _mm512_set1_epi32(activations);
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)accumulator, w, q);
#else
  // |w| x (q with w's sign): pairs reach at most 2 * 127 * 127, which sixteen bits hold.
  const __m512i turned = _mm512_mask_sub_epi8(q, _mm512_movepi8_mask(w), _mm512_setzero_si512(), q);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
  return (i32x16)_mm512_add_epi32((__m512i)accumulator, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
#elif VECTOR_BYTES == 32
static INLINE i32s dot4_half(i32s a, __m256i w, __m256i q) {
#if defined(__AVXVNNI__)
  return (i32s)_mm256_dpbusd_avx_epi32((__m256i)a, w, q);
#else
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
  return (i32s)_mm256_add_epi32((__m256i)a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
static INLINE i32x16 dot4(const i32x16 &accumulator, const weights64 &w, int32_t activations) {
  const __m256i q = _mm256_set1_epi32(activations);
  return {dot4_half(accumulator.lo, w.h[0], q), dot4_half(accumulator.hi, w.h[1], q)};
}
#elif defined(__aarch64__)
static INLINE i32s dot4_quarter(i32s a, int8x16_t w, int8x16_t q) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (i32s)vdotq_s32((int32x4_t)a, w, q);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(q)));
  const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(q)));
  return (i32s)vaddq_s32((int32x4_t)a, vpaddq_s32(low, high));
#endif
}
static INLINE i32x16 dot4(const i32x16 &accumulator, const weights64 &w, int32_t activations) {
  const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(activations));
  return {{dot4_quarter(accumulator.lo.lo, w.q[0], q), dot4_quarter(accumulator.lo.hi, w.q[1], q)},
          {dot4_quarter(accumulator.hi.lo, w.q[2], q), dot4_quarter(accumulator.hi.hi, w.q[3], q)}};
}
#else
static OUTLINE i32s dot4_quarter(i32s a, const int8_t *w, int32_t activations) {
  int8_t q[4];
  memcpy(q, &activations, 4);
  for (int c = 0; c < 4; c++) a[c] += w[4 * c] * q[0] + w[4 * c + 1] * q[1] + w[4 * c + 2] * q[2] + w[4 * c + 3] * q[3];
  return a;
}
static OUTLINE i32x16 dot4(const i32x16 &accumulator, const weights64 &w, int32_t activations) {
  return {{dot4_quarter(accumulator.lo.lo, w.w, activations), dot4_quarter(accumulator.lo.hi, w.w + 16, activations)},
          {dot4_quarter(accumulator.hi.lo, w.w + 32, activations), dot4_quarter(accumulator.hi.hi, w.w + 48, activations)}};
}
#endif

// --- floats and bfloat16 numbers ----------------------------------------------------------------------------------------------
//
// Pairs of bfloat16 numbers are summed as AVX512-BF16's instruction does it, two fused multiply-adds, the odd one first. It takes
// denormals for zeros and makes them zeros; nobody notices, because all factors were made by round_bf16: what is not 0 is a
// multiple of 2^-63, so are products and sums of 2^-126, and that is no denormal yet.

#if defined(DOT_TAKES_PAIRS)
typedef BF16 Factor;  // what multiplies a pair of weights: two of them lie side by side
static INLINE void store_factors(Factor *p, const f32x16 &x) { store_rounded(p, x); }
static INLINE void store_plain_factors(Factor *p, const f32x16 &x) {  // not NaN, 0 or at least 2^-56
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#else
typedef float Factor;
static INLINE void store_factors(Factor *p, const f32x16 &x) { store(p, round_bf16(x)); }
static INLINE void store_plain_factors(Factor *p, const f32x16 &x) {
  const i32x16 bits = as_ints(x);
  store(p, as_floats((bits + ((bits >> 16 & 1) + 0x7fff)) & (int32_t)0xffff0000));
}
#endif

template <class E>
struct Products {  // of elements E and floats
  typedef float Other;
  typedef f32x16 Many;
  static constexpr int STEP = 1;  // elements along the depth in a lane
  static INLINE Many many(const E *p) { return load(p); }
  static INLINE Many spread(const float *p) { return splat(*p); }
  static INLINE f32x16 add(const f32x16 &sum, const Many &a, const Many &b) { return fma(b, a, sum); }
  static INLINE Many first_only(const Many &a) { return a; }
};

template <>
struct Products<Paired> {
  typedef Factor Other;
  static constexpr int STEP = 2;
#if defined(DOT_TAKES_PAIRS)
  typedef __m512i Many;
  static INLINE Many many(const Paired *p) { return _mm512_loadu_si512(p); }
  static INLINE Many spread(const Factor *p) {
    int32_t two;
    memcpy(&two, p, 4);
    return _mm512_set1_epi32(two);
  }
  static INLINE f32x16 add(const f32x16 &sum, const Many &a, const Many &b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static INLINE Many first_only(const Many &a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xffff)); }
#else
  struct Many {
    f32x16 even, odd;
  };
  static INLINE Many many(const Paired *p) {
    float bits[16];
    memcpy(bits, p, sizeof bits);
    const i32x16 both = as_ints(load(bits));
    return {as_floats(both << 16), as_floats(both & (int32_t)0xffff0000)};
  }
  static INLINE Many spread(const Factor *p) { return {splat(p[0]), splat(p[1])}; }
  static INLINE f32x16 add(const f32x16 &sum, const Many &a, const Many &b) { return fma(b.even, a.even, fma(b.odd, a.odd, sum)); }
  static INLINE Many first_only(const Many &a) { return {a.even, splat(0.f)}; }
#endif
};

// Bytes of a cache, whose scales are applied to sums and weights: small integers, so bfloat16 numbers as they are.
struct Byte {
  int8_t value;
};
struct Widened : Paired {};  // those of a byte

template <>
struct Products<Widened> : Products<Paired> {};

template <>
struct Products<Byte> : Products<Paired> {
#if defined(DOT_TAKES_PAIRS)
  static INLINE Many many(const Byte *p) {
    const __m512 low = (__m512)load((const int8_t *)p), high = (__m512)load((const int8_t *)p + 16);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  }
#else
  static INLINE Many many(const Byte *p) {
    const i32x16 both = as_ints(load((const BF16 *)p));  // a pair of bytes in the upper half of each
    return {to_float(both << 8 >> 24), to_float(both >> 24)};
  }
#endif
};
template <class E>
constexpr bool has_scales = std::is_same_v<E, Byte> || std::is_same_v<E, Widened>;
