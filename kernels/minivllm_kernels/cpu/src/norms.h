// What a row goes through between matrix products: RMSNorm (Zhang and Sennrich 2019) and rotary positions (Su et al. 2021; NeoX).
#pragma once
#include "vec.h"

static INLINE float sum_of_squares(const float *x, int size) {
  f32x16 even = {}, odd = {};
  int i = 0;
  for (; i + 32 <= size; i += 32) {
    f32x16 a = load(x + i), b = load(x + i + 16);
    even = fma(a, a, even), odd = fma(b, b, odd);
  }
  if (i < size) {
    f32x16 a = load(x + i);
    even = fma(a, a, even);
  }
  return sum_lanes(even + odd);
}

static INLINE void scale_row(const float *x, float scale, const float *weight, int size, float *out) {
  for (int i = 0; i < size; i += 16) store(out + i, load(x + i) * splat(scale) * load(weight + i));
}

static INLINE void rms_norm_row(const float *x, const float *weight, int size, float eps, float *out) {
  scale_row(x, 1.f / std::sqrt(sum_of_squares(x, size) / (float)size + eps), weight, size, out);
}

// The same of up to 16 short rows in place, `stride` apart: side by side, their roots and quotients take no longer than one's.
static INLINE void rms_norm_rows(float *x, size_t stride, int rows, const float *weight, int size, float eps) {
  float sums[16] = {}, scales[16];
  for (int r = 0; r < rows; r++) sums[r] = sum_of_squares(x + r * stride, size);
  store(scales, splat(1.f) / sqrt_of(load(sums) / (float)size + eps));
  for (int r = 0; r < rows; r++) scale_row(x + r * stride, scales[r], weight, size, x + r * stride);
}

// In place; cos_sin: D / 2 cosines, then D / 2 sines.
static INLINE void rotate_row(float *x, const float *cos_sin, int D, float scale) {
  const int half = D / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    f32x16 c = load(cos_sin + i) * scale, s = load(cos_sin + half + i) * scale, a = load(x + i), b = load(x + half + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {  // half may be no multiple of 16 (head size 80)
    float c = cos_sin[i] * scale, s = cos_sin[half + i] * scale, a = x[i], b = x[half + i];
    x[i] = a * c - b * s;
    x[half + i] = b * c + a * s;
  }
}
