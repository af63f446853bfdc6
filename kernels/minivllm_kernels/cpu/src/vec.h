// Sixteen lanes, on any instruction set: one AVX-512 register, two AVX registers, four NEON registers, or plain C.
//
// Contract: every function gives the same bits on every instruction set. So fused multiply-adds are written out (contraction is
// off), sums across lanes have one fixed tree, and the exponential is a polynomial of its own. Kernels are written once, over
// these types; only this file and dot.h know what machine they run on.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef float f32x16_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef u16x16 u16x16_any __attribute__((aligned(2), may_alias));
typedef i8x16 i8x16_any __attribute__((aligned(1), may_alias));

struct BF16 {  // the upper half of a float
  uint16_t bits;
};

static INLINE f32x16 splat(float x) { return f32x16{} + x; }
static INLINE i32x16 splat_i32(int32_t x) { return i32x16{} + x; }
static INLINE void store(float *p, f32x16 v) { *(f32x16_any *)p = v; }

static INLINE f32x16 load(const float *p) { return *(const f32x16_any *)p; }
static INLINE f32x16 load(const BF16 *p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
  return (f32x16)(__builtin_convertvector(*(const u16x16_any *)p, u32x16) << 16);
#endif
}
static INLINE f32x16 load(const int8_t *p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(*(const i8x16_any *)p, i32x16), f32x16);
#endif
}

static INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union { f32x16 v; __m256 h[2]; } x{a}, y{b}, z{c};
  z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
  z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
  return z.v;
#elif defined(__aarch64__)
  union { f32x16 v; float32x4_t q[4]; } x{a}, y{b}, z{c};
  for (int i = 0; i < 4; i++) z.q[i] = vfmaq_f32(z.q[i], x.q[i], y.q[i]);
  return z.v;
#else
  for (int i = 0; i < 16; i++) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

static INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return mask ? a : b; }
static INLINE f32x16 vmax(f32x16 a, f32x16 b) {  // the second operand where either is NaN, as x86 does
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
static INLINE f32x16 vabs(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }

static INLINE i32x16 round_to_int(f32x16 a) {  // to the nearest, ties to even; |a| < 2^22
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtps_epi32((__m512)a);
#else
  const f32x16 magic = splat(12582912.f);  // 1.5 * 2^23: the sum leaves the integer in the low bits
  return (i32x16)(a + magic) - (i32x16)magic;
#endif
}
static INLINE f32x16 to_float(i32x16 a) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtepi32_ps((__m512i)a);
#else
  return __builtin_convertvector(a, f32x16);
#endif
}

// Sums and maxima over the lanes. The tree of the sum is fixed: within quarters (0+2)+(1+3), then (Q0+Q1)+(Q2+Q3).
static INLINE float sum_lanes(f32x16 v) {
  float q[4];
  for (int i = 0; i < 4; i++) q[i] = (v[4 * i] + v[4 * i + 2]) + (v[4 * i + 1] + v[4 * i + 3]);
  return (q[0] + q[1]) + (q[2] + q[3]);
}
static INLINE int32_t sum_lanes(i32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
#endif
}
static INLINE float max_lanes(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// 2^y for y <= 0 or so: relative error about 2e-7, exactly 1 at 0, exactly 0 below -126. The constant term of the polynomial
// is exactly 1: rescaling by 2^0 must change nothing, or a chunk of keys that a row cannot see would alter the row.
static INLINE f32x16 exp2v(f32x16 y) {
  const f32x16 low = splat(-126.f);
  i32x16 alive = y > low;
  y = vmax(y, low);
#if defined(__AVX512F__)
  f32x16 whole = (f32x16)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  f32x16 near = to_float(round_to_int(y));
  f32x16 whole = select(near > y, near - 1.f, near);
#endif
  f32x16 r = y - whole;
  f32x16 p = splat(0.00186713074f);
  p = fma(p, r, splat(0.00901702846f));
  p = fma(p, r, splat(0.0557999149f));
  p = fma(p, r, splat(0.240164449f));
  p = fma(p, r, splat(0.693151312f));
  p = fma(p, r, splat(1.f));
  i32x16 bits = (i32x16)p + (round_to_int(whole) << 23);
  return (f32x16)(bits & alive);
}
constexpr float LOG2E = 1.44269504f;

static INLINE f32x16 silu(f32x16 x) {  // x / (1 + e^-x); beyond +-87 it is x or 0 to the last bit
  f32x16 y = x * -LOG2E;
  y = select(y > splat(126.f), splat(126.f), y);
  // exp2v wants a negative argument: e^-x = 1 / e^x where x is negative.
  i32x16 negative = x < splat(0.f);
  f32x16 e = exp2v(select(negative, -y, y));
  return select(negative, x * e / (e + 1.f), x / (e + 1.f));
}
