// Sixteen lanes, on any instruction set: one AVX-512 register, two AVX registers, four NEON or SSE registers, or plain C.
//
// Contract: every function gives the same bits on every instruction set. So fused multiply-adds are written out (contraction is
// off), sums across lanes have one fixed tree, and the exponential is a polynomial of its own. Kernels are written once, over
// these types; only this file and dot.h know what machine they run on.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define OUTLINE __attribute__((noinline))  // what plain C does in many instructions, or the compiler works for minutes

struct BF16 {  // the upper half of a float
  uint16_t bits;
};
struct Paired : BF16 {};  // one that lies beside its partner in a sum: see dot.h

// --- what the machine has: `f32s` and `i32s` are its widest vectors ----------------------------------------------------------

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
constexpr int LANES = VECTOR_BYTES / 4;
typedef float f32s __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t i32s __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t u32s __attribute__((vector_size(VECTOR_BYTES)));
typedef f32s f32s_any __attribute__((aligned(4), may_alias));
typedef uint16_t u16s __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef u16s u16s_any __attribute__((aligned(2), may_alias));

static INLINE void fill(f32s &v, float x) {  // not f32s{} + x: that is an addition, since 0 + -0 is 0
#if VECTOR_BYTES == 64
  v = (f32s)_mm512_set1_ps(x);
#elif VECTOR_BYTES == 32
  v = (f32s)_mm256_set1_ps(x);
#else
  v = f32s{x, x, x, x};
#endif
}
static INLINE void fill(i32s &v, int32_t x) { v = i32s{} + x; }
static INLINE void read(f32s &v, const float *p) { v = *(const f32s_any *)p; }
static INLINE void read(f32s &v, const BF16 *p) { v = (f32s)(__builtin_convertvector(*(const u16s_any *)p, u32s) << 16); }
static INLINE void write(float *p, f32s v) { *(f32s_any *)p = v; }
static INLINE f32s as_floats(i32s v) { return (f32s)v; }
static INLINE i32s as_ints(f32s v) { return (i32s)v; }
static INLINE f32s to_float(i32s v) { return __builtin_convertvector(v, f32s); }
static INLINE f32s select(i32s mask, f32s a, f32s b) { return mask ? a : b; }
static INLINE i32s select(i32s mask, i32s a, i32s b) { return mask ? a : b; }

#if VECTOR_BYTES == 64
static INLINE f32s fma(f32s a, f32s b, f32s c) { return (f32s)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif VECTOR_BYTES == 32
static INLINE f32s fma(f32s a, f32s b, f32s c) { return (f32s)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
static INLINE f32s fma(f32s a, f32s b, f32s c) { return (f32s)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
static OUTLINE f32s fma(f32s a, f32s b, f32s c) {
  return f32s{fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3])};
}
#endif
static INLINE f32s vmax(f32s a, f32s b) {  // the second operand where either is NaN, as x86 does
#if VECTOR_BYTES == 64
  return (f32s)_mm512_max_ps((__m512)a, (__m512)b);
#elif VECTOR_BYTES == 32
  return (f32s)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
static INLINE i32s vmax(i32s a, i32s b) {
#if VECTOR_BYTES == 64
  return (i32s)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif VECTOR_BYTES == 32
  return (i32s)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}
static INLINE i32s round_to_int(f32s a) {  // to the nearest, ties to even; |a| < 2^22
#if VECTOR_BYTES == 64
  return (i32s)_mm512_cvtps_epi32((__m512)a);
#elif VECTOR_BYTES == 32
  return (i32s)_mm256_cvtps_epi32((__m256)a);
#elif defined(__aarch64__)
  return (i32s)vcvtnq_s32_f32((float32x4_t)a);
#else
  const f32s magic = f32s{} + 12582912.f;  // 1.5 * 2^23: the sum leaves the integer in the low bits
  return (i32s)(a + magic) - (i32s)magic;
#endif
}
static INLINE f32s sqrt_of(f32s a) {
#if VECTOR_BYTES == 64
  return (f32s)_mm512_sqrt_ps((__m512)a);
#elif VECTOR_BYTES == 32
  return (f32s)_mm256_sqrt_ps((__m256)a);
#elif defined(__aarch64__)
  return (f32s)vsqrtq_f32((float32x4_t)a);
#else
  return f32s{std::sqrt(a[0]), std::sqrt(a[1]), std::sqrt(a[2]), std::sqrt(a[3])};
#endif
}
static INLINE f32s floor_of(f32s a) {  // |a| < 2^22
#if VECTOR_BYTES == 64
  return (f32s)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif VECTOR_BYTES == 32
  return (f32s)_mm256_floor_ps((__m256)a);
#elif defined(__aarch64__)
  return (f32s)vrndmq_f32((float32x4_t)a);
#else
  f32s near = to_float(round_to_int(a));
  return near > a ? near - 1.f : near;
#endif
}

// --- sixteen lanes of it ------------------------------------------------------------------------------------------------------

template <class H>
struct Pair {  // two halves side by side; every operation is that of the halves
  H lo, hi;
  INLINE auto operator[](int i) const {
    constexpr int half = sizeof(H) / 4;
    return i < half ? lo[i] : hi[i - half];
  }
};
#define PAIRWISE(op)                                                                                        \
  template <class H>                                                                                        \
  static INLINE auto operator op(const Pair<H> &a, const Pair<H> &b) {                                      \
    return Pair<decltype(a.lo op b.lo)>{a.lo op b.lo, a.hi op b.hi};                                        \
  }                                                                                                         \
  template <class H, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                            \
  static INLINE auto operator op(const Pair<H> &a, S b) {                                                   \
    return Pair<decltype(a.lo op b)>{a.lo op b, a.hi op b};                                                 \
  }
PAIRWISE(+)
PAIRWISE(-)
PAIRWISE(*)
PAIRWISE(/)
PAIRWISE(&)
PAIRWISE(|)
PAIRWISE(<<)
PAIRWISE(>>)
PAIRWISE(<)
PAIRWISE(>)
PAIRWISE(==)
PAIRWISE(!=)
#undef PAIRWISE
template <class H> static INLINE Pair<H> operator-(const Pair<H> &a) { return {-a.lo, -a.hi}; }
template <class H, class B> static INLINE Pair<H> &operator+=(Pair<H> &a, const B &b) { return a = a + b; }
template <class H, class B> static INLINE Pair<H> &operator*=(Pair<H> &a, const B &b) { return a = a * b; }
template <class H, class B> static INLINE Pair<H> &operator|=(Pair<H> &a, const B &b) { return a = a | b; }

template <class H, class S> static INLINE void fill(Pair<H> &v, S x) { fill(v.lo, x), fill(v.hi, x); }
template <class H, class E> static INLINE void read(Pair<H> &v, const E *p) { read(v.lo, p), read(v.hi, p + sizeof(H) / 4); }
template <class H> static INLINE void write(float *p, const Pair<H> &v) { write(p, v.lo), write(p + sizeof(H) / 4, v.hi); }
template <class H> static INLINE auto as_floats(const Pair<H> &v) { return Pair<decltype(as_floats(v.lo))>{as_floats(v.lo), as_floats(v.hi)}; }
template <class H> static INLINE auto as_ints(const Pair<H> &v) { return Pair<decltype(as_ints(v.lo))>{as_ints(v.lo), as_ints(v.hi)}; }
template <class H> static INLINE auto to_float(const Pair<H> &v) { return Pair<decltype(to_float(v.lo))>{to_float(v.lo), to_float(v.hi)}; }
template <class M, class H>
static INLINE Pair<H> select(const Pair<M> &mask, const Pair<H> &a, const Pair<H> &b) {
  return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}
template <class H>
static INLINE Pair<H> fma(const Pair<H> &a, const Pair<H> &b, const Pair<H> &c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
template <class H> static INLINE Pair<H> vmax(const Pair<H> &a, const Pair<H> &b) { return {vmax(a.lo, b.lo), vmax(a.hi, b.hi)}; }
template <class H> static INLINE auto round_to_int(const Pair<H> &a) { return Pair<decltype(round_to_int(a.lo))>{round_to_int(a.lo), round_to_int(a.hi)}; }
template <class H> static INLINE Pair<H> sqrt_of(const Pair<H> &a) { return {sqrt_of(a.lo), sqrt_of(a.hi)}; }
template <class H> static INLINE Pair<H> floor_of(const Pair<H> &a) { return {floor_of(a.lo), floor_of(a.hi)}; }

#if VECTOR_BYTES == 64
typedef f32s f32x16;
typedef i32s i32x16;
#elif VECTOR_BYTES == 32
typedef Pair<f32s> f32x16;
typedef Pair<i32s> i32x16;
#else
typedef Pair<Pair<f32s>> f32x16;
typedef Pair<Pair<i32s>> i32x16;
#endif

static INLINE f32x16 splat(float x) {
  f32x16 v;
  fill(v, x);
  return v;
}
static INLINE i32x16 splat_i32(int32_t x) {
  i32x16 v;
  fill(v, x);
  return v;
}
static INLINE i32x16 lane_numbers() {  // 0, 1, … 15
  const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 v;
  float bits[16];
  memcpy(bits, lanes, sizeof bits);
  read(v, bits);
  return as_ints(v);
}
static INLINE f32x16 load(const float *p) {
  f32x16 v;
  read(v, p);
  return v;
}
static INLINE f32x16 load(const BF16 *p) {
  f32x16 v;
  read(v, p);
  return v;
}
static INLINE f32x16 load(const int8_t *p) {
#if VECTOR_BYTES == 64
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif VECTOR_BYTES == 32
  const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
  return to_float(i32x16{(i32s)_mm256_cvtepi8_epi32(bytes), (i32s)_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
#elif defined(__aarch64__)
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return to_float(i32x16{{(i32s)vmovl_s16(vget_low_s16(low)), (i32s)vmovl_s16(vget_high_s16(low))},
                         {(i32s)vmovl_s16(vget_low_s16(high)), (i32s)vmovl_s16(vget_high_s16(high))}});
#else
  float wide[16];
  for (int i = 0; i < 16; i++) wide[i] = p[i];
  return load(wide);
#endif
}
static INLINE void store(float *p, const f32x16 &v) { write(p, v); }
static INLINE void store_bytes(int8_t *p, const i32x16 &v) {  // values within -127..127
#if VECTOR_BYTES == 64
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif VECTOR_BYTES == 32
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.lo, (__m256i)v.hi), 0xd8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#elif defined(__aarch64__)
  const int16x8_t low = vcombine_s16(vmovn_s32((int32x4_t)v.lo.lo), vmovn_s32((int32x4_t)v.lo.hi));
  const int16x8_t high = vcombine_s16(vmovn_s32((int32x4_t)v.hi.lo), vmovn_s32((int32x4_t)v.hi.hi));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
#else
  for (int i = 0; i < 16; i++) p[i] = (int8_t)v[i];
#endif
}
// To the nearest bfloat16, ties to even; what is below 2^-56 becomes 0, see dot.h. As a float whose lower half is 0.
static INLINE f32x16 round_bf16(const f32x16 &x) {
  const i32x16 bits = as_ints(x), size = bits & 0x7fffffff;
  i32x16 near = (bits + ((bits >> 16 & 1) + 0x7fff)) & (int32_t)0xffff0000;
  near = select((near & 0x7fffffff) < splat_i32(0x23800000), splat_i32(0), near);
  return as_floats(select(size > splat_i32(0x7f800000), splat_i32(0x7fc00000), near));
}
static INLINE void store_bf16(BF16 *p, const f32x16 &x) {  // of round_bf16
#if VECTOR_BYTES == 64
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)as_ints(x), 16)));
#else
  float wide[16];
  store(wide, x);
  for (int i = 0; i < 16; i++) memcpy(p + i, (const char *)(wide + i) + 2, 2);  // little endian
#endif
}
static INLINE void store_rounded(BF16 *p, const f32x16 &x) {
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)  // whose conversion rounds alike, but keeps small numbers
  const __m256i near = (__m256i)_mm512_cvtneps_pbh((__m512)x), size = _mm256_and_si256(near, _mm256_set1_epi16(0x7fff));
  _mm256_storeu_si256((__m256i *)p, _mm256_maskz_mov_epi16(_mm256_cmpge_epu16_mask(size, _mm256_set1_epi16(0x2380)), near));
#else
  store_bf16(p, round_bf16(x));
#endif
}
static INLINE i32x16 abs_bits(const f32x16 &a) { return as_ints(a) & 0x7fffffff; }  // ordered as |a|, NaN above infinity

// Sums and maxima over the lanes. The tree of the sum is fixed: within quarters (0+2)+(1+3), then (Q0+Q1)+(Q2+Q3).
static INLINE float sum_lanes(const f32x16 &v) {
#if VECTOR_BYTES == 64
  __m512 x = (__m512)v;
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return _mm512_cvtss_f32(_mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e)));
#endif
  float q[4];
  for (int i = 0; i < 4; i++) q[i] = (v[4 * i] + v[4 * i + 2]) + (v[4 * i + 1] + v[4 * i + 3]);
  return (q[0] + q[1]) + (q[2] + q[3]);
}
static INLINE int32_t sum_lanes(const i32x16 &v) {
#if VECTOR_BYTES == 64
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
#endif
}
static INLINE float max_lanes(const f32x16 &v) {
#if VECTOR_BYTES == 64
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}
static INLINE int32_t max_lanes(const i32x16 &v) {
#if VECTOR_BYTES == 64
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t m = v[0];
  for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

static INLINE float peak_lanes(const i32x16 &sizes) {  // of abs_bits: NaN if one of them is
  const int32_t bits = max_lanes(sizes);
  float peak;
  memcpy(&peak, &bits, 4);
  return peak;
}

// 2^y for y <= 0 or so: relative error about 2e-7, exactly 1 at 0, exactly 0 below -126. The constant term of the polynomial
// is exactly 1: rescaling by 2^0 must change nothing, or a chunk of keys that a row cannot see would alter the row.
// Exactly 0 at or below `least` already, if one is given.
static INLINE f32x16 exp2v(f32x16 y, float least = -126.f) {
  const f32x16 low = splat(least);
  i32x16 alive = y > low;
  y = vmax(y, low);
  f32x16 whole = floor_of(y);
  f32x16 r = y - whole;
  f32x16 p = splat(0.00186713074f);
  p = fma(p, r, splat(0.00901702846f));
  p = fma(p, r, splat(0.0557999149f));
  p = fma(p, r, splat(0.240164449f));
  p = fma(p, r, splat(0.693151312f));
  p = fma(p, r, splat(1.f));
#if VECTOR_BYTES == 64
  return (f32x16)_mm512_maskz_scalef_ps(_mm512_movepi32_mask((__m512i)alive), (__m512)p, (__m512)whole);
#else
  return as_floats((as_ints(p) + (round_to_int(whole) << 23)) & alive);
#endif
}
constexpr float LOG2E = 1.44269504f;

static INLINE f32x16 silu(const f32x16 &x) {  // x / (1 + e^-x); beyond +-87 it is x or 0 to the last bit
  f32x16 y = x * -LOG2E;
  y = select(y > splat(126.f), splat(126.f), y);
  // exp2v wants a negative argument: e^-x = 1 / e^x where x is negative.
  i32x16 negative = x < splat(0.f);
  f32x16 e = exp2v(select(negative, -y, y));
  return select(negative, x * e, x) / (e + 1.f);
}
