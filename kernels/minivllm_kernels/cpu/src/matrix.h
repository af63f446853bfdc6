// y = x * W^T for a few rows of x: int8, int4, bfloat16 or float32 weights (rows.h), packed once, streamed once per call.
//
// A row's result is one chain of fused multiply-adds per channel, in ascending k (int8: exact integers inside a group, groups in
// ascending order). Tiles of rows only share loads, so a row gets the same bits alone and in any batch.
#pragma once
#include "rows.h"
#include "threads.h"

#if VECTOR_BYTES == 64
constexpr int TILE_INT8 = 6, TILE_FLOAT = 12;
#else
constexpr int TILE_INT8 = 2, TILE_FLOAT = 2;
#endif

enum Epilogue { STORE, ADD, SILU_MUL };  // SILU_MUL: a panel is 16 gate and 16 up channels, 16 products are written
enum Ahead { NONE, SOME, ALL };  // of a turn's lines of weights

// M rows x 32 channels over the whole depth. `ahead` is where the weights come from that are needed next: the same panel a
// little later when there is one tile, this tile's share of the next panel otherwise. Without it memory and arithmetic do not
// overlap. The rows after these are asked for too: with many of them they come from the second-level cache.
template <int M, Ahead AHEAD>
static INLINE void tile_int8(const int8_t *q, const float *scale, const int32_t *fix, int depth, const uint8_t *w,
                             const char *ahead, int lines, f32x16 (&sum)[M][2]) {
  const int groups = depth / GROUP;
  const char *next_rows = (const char *)(q + (size_t)M * depth);
  for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = f32x16{};
  for (int g = 0; g < groups; g++) {
    i32x16 part[M][2];
    for (int m = 0; m < M; m++) part[m][0] = part[m][1] = dot_start(fix[m * groups + g]);
#pragma GCC unroll 16
    for (int k = 0; k < GROUP / 4; k++) {
      weights64 w0 = load_weights(w), w1 = load_weights(w + 64);
      w += 128;
      if constexpr (AHEAD == ALL) {
        __builtin_prefetch(ahead + 128 * k, 0, 3);
        __builtin_prefetch(ahead + 128 * k + 64, 0, 3);
      } else if constexpr (AHEAD == SOME) {
        if (k < lines) __builtin_prefetch(ahead + 64 * k, 0, 2);
      }
      if (M > 1 && k < M) __builtin_prefetch(next_rows + 64 * k, 0, 3);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        int32_t four;
        memcpy(&four, q + (size_t)m * depth + 4 * k, 4);
        part[m][0] = dot4(part[m][0], w0, four);
        part[m][1] = dot4(part[m][1], w1, four);
      }
    }
    q += GROUP;
    next_rows += M * GROUP;
    ahead += lines * 64;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      f32x16 s = splat(scale[m * groups + g]);
      sum[m][0] = fma(to_float(part[m][0]), s, sum[m][0]);
      sum[m][1] = fma(to_float(part[m][1]), s, sum[m][1]);
    }
  }
}

template <int M, class W>
static INLINE void tile_float(const typename Products<W>::Other *x, int depth, const W *w, const char *ahead, int lines, f32x16 (&sum)[M][2]) {
  typedef Products<W> P;
  for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = f32x16{};
  const int turns = depth / (16 * P::STEP);
  const char *next_rows = (const char *)(x + (size_t)M * depth);
  constexpr int LINES = 16 * P::STEP * PANEL * sizeof(W) / 64;  // lines of weights in a turn of sixteen steps
  for (int turn = 0; turn < turns; turn++) {
#pragma GCC unroll 4
    for (int k = 0; k < 16; k++) {
      const typename P::Many w0 = P::many(w), w1 = P::many(w + 16 * P::STEP);
      w += PANEL * P::STEP;
      if (lines == LINES) {
        for (int i = k * LINES / 16; i < (k + 1) * LINES / 16; i++) __builtin_prefetch(ahead + 64 * i, 0, 3);
      } else if (k < lines) {
        __builtin_prefetch(ahead + 64 * k, 0, 2);
      }
      if (M > 1 && k < M) __builtin_prefetch(next_rows + 64 * k, 0, 3);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        const typename P::Many b = P::spread(x + (size_t)m * depth + k * P::STEP);
        sum[m][0] = P::add(sum[m][0], w0, b);
        sum[m][1] = P::add(sum[m][1], w1, b);
      }
    }
    x += 16 * P::STEP;
    next_rows += M * 64;
    ahead += lines * 64;
  }
}

template <int M>
static INLINE void finish(f32x16 (&sum)[M][2], const Matrix &w, int panel, float *y, size_t stride, Epilogue end) {
  f32x16 s0 = splat(1.f), s1 = s0, b0 = {}, b1 = {};
  if (w.kind == INT8) s0 = load(w.scale + panel * PANEL), s1 = load(w.scale + panel * PANEL + 16);
  if (w.bias) b0 = load(w.bias + panel * PANEL), b1 = load(w.bias + panel * PANEL + 16);
  for (int m = 0; m < M; m++) {
    f32x16 a = sum[m][0], b = sum[m][1];
    if (w.kind == INT8) a *= s0, b *= s1;
    if (w.bias) a += b0, b += b1;
    float *to = y + m * stride;
    if (end == SILU_MUL) {
      store(to, silu(a) * b);
      continue;
    }
    if (end == ADD) a += load(to), b += load(to + 16);
    store(to, a);
    store(to + 16, b);
  }
}

// Where a tile of rows and a panel meet.
struct Place {
  const Rows &x;
  const Matrix &w;
  size_t row;
  int panel;
  const char *ahead;
  int lines;
  float *y;
  size_t stride;
  Epilogue end;
};

template <int M>
static inline void tile_of_bytes(const Place &p) {
  f32x16 sum[M][2];
  const int depth = p.w.depth, groups = depth / unit_of(p.w.kind);
  const int8_t *q = p.x.q + p.row * depth;
  const float *scale = p.x.scale + p.row * groups;
  const int32_t *fix = p.x.fix + p.row * groups;
  const uint8_t *w = (const uint8_t *)p.w.data;
  if (p.w.kind == INT8) {
    const uint8_t *at = w + (size_t)p.panel * PANEL * depth;
    if (p.lines == 0) tile_int8<M, NONE>(q, scale, fix, depth, at, p.ahead, p.lines, sum);
    else if (p.lines == GROUP / 2) tile_int8<M, ALL>(q, scale, fix, depth, at, p.ahead, p.lines, sum);
    else tile_int8<M, SOME>(q, scale, fix, depth, at, p.ahead, p.lines, sum);
  } else if constexpr (M <= TILE_INT4) {
    tile_int4<M>(q, scale, fix, depth, w + (size_t)p.panel * groups * GROUP4_BYTES, p.ahead, p.lines, sum);
  }
  finish<M>(sum, p.w, p.panel, p.y, p.stride, p.end);
}

template <int M>
static inline void tile_of_floats(const Place &p) {
  f32x16 sum[M][2];
  const int depth = p.w.depth;
  const size_t at = (size_t)p.panel * PANEL * depth;
  const float *x = p.x.x + p.row * depth;
  if (p.w.kind == BFLOAT16_DOT)
    tile_float<M>((const Factor *)p.x.x + p.row * depth, depth, (const Paired *)p.w.data + at, p.ahead, p.lines, sum);
  else if (p.w.kind == BFLOAT16) tile_float<M>(x, depth, (const BF16 *)p.w.data + at, p.ahead, p.lines, sum);
  else tile_float<M>(x, depth, (const float *)p.w.data + at, p.ahead, p.lines, sum);
  finish<M>(sum, p.w, p.panel, p.y, p.stride, p.end);
}

template <bool BYTES, int M>
static void tile(int rows, const Place &p) {
  if (M == 1 || rows == M) {
    if (p.end == ADD)
      for (int m = 0; m < M; m++) __builtin_prefetch(p.y + m * p.stride, 1, 3), __builtin_prefetch(p.y + m * p.stride + 16, 1, 3);
    if constexpr (BYTES) tile_of_bytes<M>(p);
    else tile_of_floats<M>(p);
  } else if constexpr (M > 1) {
    tile<BYTES, M - 1>(rows, p);
  }
}

// Panels [first, last) for all rows. `stride` is between rows of y. Rows are taken in blocks that stay in the second-level cache
// while the panels pass by.
static void multiply_panels(const Rows &x, int rows, const Matrix &w, float *y, size_t stride, Epilogue end, int first, int last) {
  constexpr int BLOCK_BYTES = 320 * 1024;
  const int limit = w.kind == INT8 ? TILE_INT8 : w.kind == INT4 ? TILE_INT4 : TILE_FLOAT, turns = w.depth / unit_of(w.kind);
  const size_t panel_size = panel_bytes(w);
  const int full = (int)(bytes_of_unit(w.kind) / 64);  // lines of weights per turn of the inner loop
  const int row_bytes = w.depth * (takes_bytes(w.kind) ? 1 : w.kind == BFLOAT16_DOT ? (int)sizeof(Factor) : 4);
  const int blocks = std::max(1, (int)(((size_t)rows * row_bytes + BLOCK_BYTES / 2) / BLOCK_BYTES));
  const int block = ((rows + blocks - 1) / blocks + limit - 1) / limit * limit;
  for (int from = 0; from < rows; from += block) {
    const int here = std::min(block, rows - from), tiles = (here + limit - 1) / limit;
    for (int panel = first; panel < last; panel++) {
      const char *data = (const char *)w.data + panel * panel_size, *ahead = data + (tiles == 1 ? 2048 : panel_size);
      const char *enough = from ? data : data + 2 * panel_size;  // later blocks find the weights where the first one left them
      size_t row = from;
      for (int t = 0; t < tiles; t++) {
        const int m = (from + here - (int)row + tiles - t - 1) / (tiles - t);  // even tiles: 8 rows are 4 + 4, not 6 + 2
        const int lines = tiles == 1 ? full : ahead < enough ? (full + tiles - 1) / tiles : 0;
        float *to = y + (size_t)panel * (end == SILU_MUL ? PANEL / 2 : PANEL) + row * stride;
        const Place place{x, w, row, panel, ahead, lines, to, stride, end};
        if (takes_bytes(w.kind)) tile<true, std::max(TILE_INT8, TILE_INT4)>(m, place);
        else tile<false, TILE_FLOAT>(m, place);
        ahead += (size_t)lines * 64 * turns;
        row += m;
      }
    }
  }
}

// All panels. `counters`: see share_out.
static void multiply(const Rows &x, int rows, const Matrix &w, float *y, size_t stride, Epilogue end, int threads, int id, Counter *counters) {
  const int panels = w.channels / PANEL, chunk = std::max(1, panels / (threads * 6));
  share_out(counters, panels, chunk, id, threads, [&](int first, int last) { multiply_panels(x, rows, w, y, stride, end, first, last); });
}

// Asks memory for the weights that a thread will multiply first, while it would only wait for others.
static INLINE void fetch_first(const Matrix &w, int threads, int id) {
  constexpr int BYTES = 16384;
  const char *p = (const char *)w.data + Share(w.channels / PANEL, id, threads).begin * panel_bytes(w);
  for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(p + i, 0, 2);
}
