// Causal attention over a paged cache, for decoding rows and for prompts, in one arithmetic.
//
// Cache of one layer, per block and KV head: K transposed in groups of 16 tokens, [block][head][size/16][D][16], so that one load
// brings one coordinate of 16 keys (block sizes that 16 does not divide: [block][head][size][D]); V [block][head][size][D].
// Elements float, bf16, or int8 with one float scale per token and head, [block][head][size].
//
// Keys are taken in chunks of CHUNK from position 0 on. Inside a chunk: all scores, their maximum, 2^(s - max), the sum, and the
// weighted sum of V in ascending order; chunks are merged in ascending order. This does not depend on how many queries are
// looked at together or where a prompt was cut, so a row gets the same bits decoded, prefilled, chunked, alone or in a batch.
// Masked scores become -inf by selection and V rows past the end are not read: what was never written may hold NaN.
#pragma once
#include "matrix.h"

constexpr int CHUNK = 128;
constexpr int GROUPS = CHUNK / 16;
constexpr int STRIP = 6;  // query rows that share one pass over the keys
constexpr int IN_REGISTERS = VECTOR_BYTES == 64 ? 4 : 2;  // sixteens of sums that each of up to three rows can keep there

struct Cache {  // one layer; mirrored by ctypes
  void *k, *v;
  float *k_scale, *v_scale;  // int8 only
};

struct Geometry {
  int heads, kv_heads, head_dim, block_size, kind;  // kind of the cache elements
  int group() const { return heads / kv_heads; }
  bool grouped() const { return block_size % 16 == 0; }
  size_t element(int block, int head, int offset, int d) const {  // index into K
    size_t base = ((size_t)block * kv_heads + head) * block_size;
    if (!grouped()) return (base + offset) * head_dim + d;
    return (base + (offset & ~15)) * head_dim + (size_t)d * 16 + (offset & 15);
  }
  size_t row(int block, int head, int offset) const { return ((size_t)block * kv_heads + head) * block_size + offset; }
};

static INLINE BF16 to_bf16(float x) {  // nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
static INLINE float peak_of(const float *x, int n) {  // NaN if one of them is: compared as integers, it is the largest
  int32_t top = 0, bits;
  for (int i = 0; i < n; i++) memcpy(&bits, x + i, 4), top = std::max(top, bits & 0x7fffffff);
  float peak;
  memcpy(&peak, &top, 4);
  return peak;
}

// Key and value of one token and head into their slot.
static inline void store_token(const Geometry &g, const Cache &to, int block, int head, int offset, const float *k, const float *v) {
  const int D = g.head_dim;
  const size_t row = g.row(block, head, offset);
  if (g.kind == INT8) {
    for (int side = 0; side < 2; side++) {
      const float *x = side ? v : k;
      const float peak = peak_of(x, D), inverse = inverse_scale(peak);
      (side ? to.v_scale : to.k_scale)[row] = peak * (1.f / 127.f);
      for (int d = 0; d < D; d++) {
        int8_t q = inverse > 0 ? (int8_t)std::nearbyintf(x[d] * inverse) : 0;
        if (side) ((int8_t *)to.v)[row * D + d] = q;
        else ((int8_t *)to.k)[g.element(block, head, offset, d)] = q;
      }
    }
    return;
  }
  const size_t k0 = g.element(block, head, offset, 0), step = g.grouped() ? 16 : 1;
  if (g.kind == BFLOAT16) {
    BF16 *kp = (BF16 *)to.k + k0, *vp = (BF16 *)to.v + row * D;
    for (int d = 0; d < D; d++) kp[d * step] = to_bf16(k[d]), vp[d] = to_bf16(v[d]);
  } else {
    float *kp = (float *)to.k + k0, *vp = (float *)to.v + row * D;
    for (int d = 0; d < D; d++) kp[d * step] = k[d], vp[d] = v[d];
  }
}

template <class E>
struct Keys {  // up to CHUNK keys of one head: addresses of groups of 16
  const E *k[GROUPS], *v[GROUPS];
  const float *k_scale[GROUPS], *v_scale[GROUPS];
  int count;  // keys that exist
};

template <class E>
static INLINE const E *as(const void *p) { return (const E *)p; }

// In place, from the cache.
template <class E>
static inline void point(Keys<E> &keys, const Geometry &g, const Cache &c, const int32_t *table, int head, int from, int count) {
  keys.count = count;
  for (int i = 0; i * 16 < count; i++) {
    int t = from + 16 * i, block = table[t / g.block_size], offset = t % g.block_size;
    size_t row = g.row(block, head, offset);
    keys.k[i] = as<E>(c.k) + row * g.head_dim;
    keys.v[i] = as<E>(c.v) + row * g.head_dim;
    if (g.kind == INT8) keys.k_scale[i] = c.k_scale + row, keys.v_scale[i] = c.v_scale + row;
  }
}

// Unpacked to floats in `room` (2 * CHUNK * D of them), to be used for many rows. Not for int8, whose scales go on the scores.
template <class E>
static inline void unpack(Keys<float> &keys, float *room, const Geometry &g, const Cache &c, const int32_t *table, int head,
                          int from, int count) {
  const int D = g.head_dim;
  float *k = room, *v = room + CHUNK * D;
  keys.count = count;
  for (int i = 0; i * 16 < count; i++) {
    keys.k[i] = k + i * 16 * D, keys.v[i] = v + i * 16 * D;
    if (g.grouped()) {
      int t = from + 16 * i;
      const E *source = as<E>(c.k) + g.row(table[t / g.block_size], head, t % g.block_size) * D;
      for (int d = 0; d < D; d++) store(k + (i * D + d) * 16, load(source + d * 16));
    }
  }
  for (int t = 0; t < count; t++) {
    int block = table[(from + t) / g.block_size], offset = (from + t) % g.block_size;
    size_t row = g.row(block, head, offset);
    for (int d = 0; d < D; d += 16) {
      store(v + t * D + d, load(as<E>(c.v) + row * D + d));
      if (g.grouped()) continue;
      f32x16 x = load(as<E>(c.k) + row * D + d);
      for (int j = 0; j < 16; j++) k[((t / 16) * D + d + j) * 16 + t % 16] = x[j];
    }
  }
}

// scores[m][key] of N groups from `first` on.
template <int M, int N, class E>
static INLINE void score_groups(const float *q, int D, const Keys<E> &keys, int first, int groups, float *scores) {
  f32x16 sum[M][N] = {};
  const E *k[N];
  for (int j = 0; j < N; j++) k[j] = keys.k[first + j];
  // What comes next, asked for a line at a time between the arithmetic: these V rows, and the keys after these.
  const char *next_k = (const char *)keys.k[std::min(first + N, groups - 1)];
  const char *this_v = (const char *)keys.v[first];
  const int bytes = 16 * (int)sizeof(E);
  for (int d = 0; d < D; d++) {
    __builtin_prefetch(next_k + d * bytes, 0, 2);
    __builtin_prefetch(this_v + d * bytes, 0, 2);
    f32x16 x[N];
    for (int j = 0; j < N; j++) x[j] = load(k[j] + d * 16);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      f32x16 b = splat(q[m * D + d]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) sum[m][j] = fma(b, x[j], sum[m][j]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < N; j++) {
      if constexpr (sizeof(E) == 1) sum[m][j] *= load(keys.k_scale[first + j]);
      store(scores + m * CHUNK + (first + j) * 16, sum[m][j]);
    }
}

template <int M, int C, class E>
static INLINE void weigh_values(const float *weights, const Keys<E> &keys, int D, int column, float *out) {
  f32x16 sum[M][C] = {};
  for (int t = 0; t < keys.count; t++) {
    const E *v = keys.v[t / 16] + (t % 16) * D + column;
    f32x16 x[C];
    for (int j = 0; j < C; j++) x[j] = load(v + 16 * j);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      f32x16 b = splat(weights[m * CHUNK + t]);
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) sum[m][j] = fma(b, x[j], sum[m][j]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < C; j++) store(out + m * D + column + 16 * j, sum[m][j]);
}

// One chunk of keys for M query rows `q` [M][D] (already times scale * log2 e). visible[m]: how many of the keys row m may see.
// Writes out [M][D], peak [M] and total [M]; a row that sees nothing gets peak -inf.
template <int M, class E>
static void attend(const float *q, int D, const Keys<E> &keys, const int *visible, float *out, float *peak, float *total) {
  alignas(64) float scores[M * CHUNK];
  const int groups = (keys.count + 15) / 16;
  constexpr int N = M <= 3 ? IN_REGISTERS : IN_REGISTERS / 2;
  int g = 0;
  for (; g + N <= groups; g += N) score_groups<M, N, E>(q, D, keys, g, groups, scores);
  for (; g < groups; g++) score_groups<M, 1, E>(q, D, keys, g, groups, scores);
  const i32x16 lane = lane_numbers();
  for (int m = 0; m < M; m++) {
    float *s = scores + m * CHUNK;
    f32x16 top = splat(-INFINITY);
    for (int i = 0; i < groups; i++) {
      f32x16 x = load(s + 16 * i);
      if (visible[m] < 16 * i + 16) {
        x = select(lane + 16 * i < splat_i32(visible[m]), x, splat(-INFINITY));
        store(s + 16 * i, x);
      }
      top = vmax(x, top);
    }
    peak[m] = max_lanes(top);
    f32x16 sum = {}, base = splat(visible[m] > 0 ? peak[m] : 0.f);
    for (int i = 0; i < groups; i++) {
      f32x16 e = exp2v(load(s + 16 * i) - base);
      sum += e;
      if constexpr (sizeof(E) == 1) {
        f32x16 scaled = e * load(keys.v_scale[i]);
        e = select(e > splat(0.f), scaled, e);  // the scale of a slot that was never written may be anything
      }
      store(s + 16 * i, e);
    }
    total[m] = sum_lanes(sum);
  }
  constexpr int C = M <= 3 || IN_REGISTERS == 4 ? IN_REGISTERS : 1;
  int column = 0;
  for (; column + 16 * C <= D; column += 16 * C) weigh_values<M, C, E>(scores, keys, D, column, out);
  for (; column < D; column += 16) weigh_values<M, 1, E>(scores, keys, D, column, out);
}

template <class E>
static void attend_rows(int rows, const float *q, int D, const Keys<E> &keys, const int *visible, float *out, float *peak, float *total) {
  switch (rows) {
    case 1: return attend<1, E>(q, D, keys, visible, out, peak, total);
    case 2: return attend<2, E>(q, D, keys, visible, out, peak, total);
    case 3: return attend<3, E>(q, D, keys, visible, out, peak, total);
    case 4: return attend<4, E>(q, D, keys, visible, out, peak, total);
    case 5: return attend<5, E>(q, D, keys, visible, out, peak, total);
    default: return attend<6, E>(q, D, keys, visible, out, peak, total);
  }
}

struct Running {  // softmax state of one row
  float peak, total;
};

// Fold one chunk's result into a row's running one; the same whoever computed it.
static INLINE void merge(Running &state, float *sum, const float *part, float peak, float total, int D) {
  if (peak == -INFINITY) return;
  float top = std::max(state.peak, peak);
  float keep = exp2v(splat(state.peak - top))[0], add = exp2v(splat(peak - top))[0];
  state.total = fmaf(state.total, keep, total * add);
  state.peak = top;
  for (int d = 0; d < D; d += 16) store(sum + d, fma(load(part + d), splat(add), load(sum + d) * keep));
}
static INLINE void divide(const Running &state, const float *sum, float *out, int D) {
  f32x16 inverse = splat(1.f / state.total);
  for (int d = 0; d < D; d += 16) store(out + d, load(sum + d) * inverse);
}

// --- a decoding row: one task per (row, KV head, chunk) ---------------------------------------------------------------------

// part: [group][D + 2], the last two being peak and total.
template <class E>
static void decode_chunk(const Geometry &g, const Cache &c, const int32_t *table, int head, int length, int chunk, const float *q,
                         float *part, float *room) {
  const int D = g.head_dim, from = chunk * CHUNK, count = std::min(CHUNK, length - from);
  auto all = [&](const auto &keys) {
    for (int r = 0; r < g.group(); r += STRIP) {
      int rows = std::min(STRIP, g.group() - r), visible[STRIP];
      float peak[STRIP], total[STRIP];
      for (int &v : visible) v = count;
      attend_rows(rows, q + r * D, D, keys, visible, room, peak, total);
      for (int m = 0; m < rows; m++) {
        float *to = part + (r + m) * (D + 2);
        memcpy(to, room + m * D, sizeof(float) * D);
        to[D] = peak[m], to[D + 1] = total[m];
      }
    }
  };
  if (g.grouped()) {
    Keys<E> keys;
    point(keys, g, c, table, head, from, count);
    all(keys);
  } else if constexpr (sizeof(E) > 1) {
    Keys<float> keys;
    unpack<E>(keys, room + STRIP * D, g, c, table, head, from, count);
    all(keys);
  }
}

static void decode_combine(const Geometry &g, const float *parts, int chunks, float *out, float *sum) {
  const int D = g.head_dim, stride = g.group() * (D + 2);
  for (int r = 0; r < g.group(); r++) {
    Running state{-INFINITY, 0};
    memset(sum, 0, sizeof(float) * D);
    for (int i = 0; i < chunks; i++) {
      const float *p = parts + (size_t)i * stride + r * (D + 2);
      merge(state, sum, p, p[D], p[D + 1], D);
    }
    divide(state, sum, out + r * D, D);
  }
}

// --- a prompt: one task per (sequence, KV head, tile of queries) --------------------------------------------------------------

constexpr int TILE_ROWS = 96;
static INLINE int queries_per_tile(const Geometry &g) { return std::max(1, TILE_ROWS / g.group()); }
static INLINE size_t prompt_room(const Geometry &g) {  // floats of scratch that a thread needs
  size_t rows = (size_t)queries_per_tile(g) * g.group() + STRIP;
  return 2 * CHUNK * g.head_dim + 2 * rows * g.head_dim + STRIP * g.head_dim + 2 * rows + 64;
}

// Queries [first, last) of one sequence; query i stands at position `start + i`. q and out: row i, head h at i * stride + h * D.
template <class E>
static void prompt_tile(const Geometry &g, const Cache &c, const int32_t *table, int head, int start, int first, int last,
                        const float *q, size_t q_stride, float *out, size_t out_stride, float *room) {
  const int D = g.head_dim, G = g.group(), rows = (last - first) * G, end = start + last;
  float *mine = room + 2 * CHUNK * D, *sums = mine + (rows + STRIP) * D, *part = sums + (rows + STRIP) * D;
  Running *state = (Running *)(part + STRIP * D);
  for (int r = 0; r < rows; r++) {
    memcpy(mine + r * D, q + (first + r / G) * q_stride + (head * G + r % G) * D, sizeof(float) * D);
    memset(sums + r * D, 0, sizeof(float) * D);
    state[r] = {-INFINITY, 0};
  }
  for (int from = 0; from < end; from += CHUNK) {
    const int count = std::min(CHUNK, end - from);
    auto all = [&](const auto &keys) {
      for (int r = 0; r < rows; r += STRIP) {
        int strip = std::min(STRIP, rows - r), visible[STRIP], most = 0;
        float peak[STRIP], total[STRIP];
        for (int m = 0; m < strip; m++) {
          visible[m] = std::max(0, std::min(count, start + first + (r + m) / G + 1 - from));
          most = std::max(most, visible[m]);
        }
        if (!most) continue;
        auto seen = keys;  // keys that no row of the strip can see need not be looked at
        seen.count = most;
        attend_rows(strip, mine + r * D, D, seen, visible, part, peak, total);
        for (int m = 0; m < strip; m++) merge(state[r + m], sums + (r + m) * D, part + m * D, peak[m], total[m], D);
      }
    };
    if constexpr (sizeof(E) == 1) {  // scales are applied to scores and weights, in place and unpacked alike
      Keys<int8_t> keys;
      point(keys, g, c, table, head, from, count);
      all(keys);
    } else {
      Keys<float> keys;
      unpack<E>(keys, room, g, c, table, head, from, count);
      all(keys);
    }
  }
  for (int r = 0; r < rows; r++) divide(state[r], sums + r * D, out + (first + r / G) * out_stride + (head * G + r % G) * D, D);
}
