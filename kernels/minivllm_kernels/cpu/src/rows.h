// What is multiplied: packed weights, and rows of activations in the form that a kind of weights wants.
//
// Packed weights: panels of 32 output channels. int4: see int4.h. Float kinds: [N/32][K][32]. int8: bytes w + 128, [N/32][K/4][32][4], one scale
// per channel. Activations of int8: signed bytes, one scale and one correction per row and group of GROUP values.
#pragma once
#include <algorithm>
#include <cstddef>
#include "int4.h"

#ifndef GROUP
#define GROUP 64
#endif
constexpr int PANEL = 32;

// BFLOAT16: weights are bfloat16 numbers, activations stay floats. BFLOAT16_DOT: both are bfloat16, summed in floats.
enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, BFLOAT16_DOT = 4 };

static INLINE bool takes_bytes(int kind) { return kind == INT8 || kind == INT4; }
// Activations that are made at once: bytes that share a scale. The depth of a matrix is a multiple of it.
static INLINE int unit_of(int kind) { return kind == INT8 ? GROUP : kind == INT4 ? GROUP4 : kind == BFLOAT16_DOT ? 32 : 16; }

struct Matrix {  // mirrored by ctypes in library.py
  const void *data;
  const float *scale;  // per channel, int8 only
  const float *bias;   // per channel, or null
  int32_t kind;
  int32_t channels;  // N, a multiple of PANEL
  int32_t depth;     // K, a multiple of unit_of(kind)
  int32_t pad;
};

static INLINE size_t bytes_of_unit(int kind) {  // of a panel's weights
  return kind == INT4 ? GROUP4_BYTES : (size_t)unit_of(kind) * PANEL * (kind == INT8 ? 1 : kind == FLOAT32 ? 4 : 2);
}
static INLINE size_t panel_bytes(const Matrix &w) { return w.depth / unit_of(w.kind) * bytes_of_unit(w.kind); }

// The `size` first weights of one channel, as floats. Not of int4: decoder.py refuses such an embedding.
static inline void unpack_channel(const Matrix &w, int channel, float *x, int size) {
  const int lane = channel % PANEL;
  const size_t at = (size_t)(channel / PANEL) * PANEL * w.depth;
  if (w.kind == INT8) {
    const uint8_t *p = (const uint8_t *)w.data + at + lane * 4;
    const float scale = w.scale[channel];
    for (int k = 0; k < size; k++) x[k] = ((int)p[(k / 4) * 128 + k % 4] - 128) * scale;
  } else if (w.kind == BFLOAT16 || w.kind == BFLOAT16_DOT) {
    const BF16 *p = (const BF16 *)w.data + at;
    for (int k = 0; k < size; k++) {
      const size_t place = w.kind == BFLOAT16 ? (size_t)k * PANEL + lane : (size_t)(k / 2) * 2 * PANEL + 2 * lane + k % 2;
      uint32_t bits = (uint32_t)p[place].bits << 16;
      memcpy(x + k, &bits, 4);
    }
  } else {
    const float *p = (const float *)w.data + at + lane;
    for (int k = 0; k < size; k++) x[k] = p[(size_t)k * PANEL];
  }
}

struct Rows {  // activations of a batch, [rows][depth]
  float *x;       // float kinds; of bfloat16_dot Factors
  int8_t *q;      // int8: bytes, [rows][depth]
  float *scale;   // [rows][depth / group]
  int32_t *fix;   // -128 * sum of the group
};

// What makes bytes of values up to `peak`; 0 where bytes cannot tell: of nothing but zeros, or so small that 127 / peak is
// infinite, or not finite (the scale says that).
static INLINE float inverse_scale(float peak) { return peak > 1e-36f && peak <= FLT_MAX ? 127.f / peak : 0.f; }

template <int G>
static INLINE void quantize_group(const float *x, int8_t *q, float *scale, int32_t *fix) {
  f32x16 v[G / 16];
  i32x16 top = {};
  for (int i = 0; i < G / 16; i++) {
    v[i] = load(x + 16 * i);
    top = vmax(abs_bits(v[i]), top);
  }
  const float peak = peak_lanes(top);
  if (!(peak <= FLT_MAX)) {  // the row's results are to be NaN
    memset(q, 0, G);
    *scale = NAN, *fix = 0;
    return;
  }
  const f32x16 inverse = splat(inverse_scale(peak));
  i32x16 sum = {};
  for (int i = 0; i < G / 16; i++) {
    i32x16 r = round_to_int(v[i] * inverse);
    sum += r;
    store_bytes(q + 16 * i, r);
  }
  *scale = peak * (1.f / 127.f);
  *fix = -128 * sum_lanes(sum);
}

// Values [column, column + size) of a row; `column` is a multiple of G.
template <int G>
static inline void put_bytes(const Rows &to, size_t row, int column, const float *x, int size, int depth) {
  const size_t at = row * depth + column, group = row * (depth / G) + column / G;
  int g = 0;
  for (; (g + 1) * G <= size; g++)
    quantize_group<G>(x + g * G, to.q + at + g * G, to.scale + group + g, to.fix + group + g);
  if (g * G < size) {
    float last[G] = {};
    memcpy(last, x + g * G, sizeof(float) * (size - g * G));
    quantize_group<G>(last, to.q + at + g * G, to.scale + group + g, to.fix + group + g);
  }
}

// Values [column, column + size) of a row of `depth`, in the form that `kind` of weights wants. `column` is a multiple of
// unit_of(kind); the last values are followed by zeros up to the next one.
static inline void put_part(Kind kind, const Rows &to, size_t row, int column, const float *x, int size, int depth) {
  if (kind == INT8) return put_bytes<GROUP>(to, row, column, x, size, depth);
  if (kind == INT4) return put_bytes<GROUP4>(to, row, column, x, size, depth);
  const size_t at = row * depth + column;
  const int unit = unit_of(kind), whole = (size + unit - 1) / unit * unit;
  if (kind != BFLOAT16_DOT) {
    memcpy(to.x + at, x, sizeof(float) * size);
    memset(to.x + at + size, 0, sizeof(float) * (whole - size));
    return;
  }
  Factor *p = (Factor *)to.x + at;
  for (int i = 0; i < whole; i += 16) {
    float last[16] = {};
    if (i + 16 > size) memcpy(last, x + i, sizeof(float) * std::max(0, size - i));
    store_factors(p + i, load(i + 16 > size ? last : x + i));
  }
}
