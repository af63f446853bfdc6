// Causal attention over a paged cache, for decoding rows and for prompts, in one arithmetic.
//
// Cache of one layer, per block and KV head, other layers' blocks between two of its own: K transposed in groups of 16 tokens, [block][head][size/16][D][16], so that one load
// brings one coordinate of 16 keys; V [block][head][size][D]. Elements float, bf16, or int8 with one float scale per token and
// head, [block][head][size]. Of bf16, what is summed lies in pairs: K [block][head][size/16][D/2][16][2], V
// [block][head][size/2][D][2]; queries and softmax weights are rounded to bf16, sums are floats. Block sizes that 16 does not
// divide: [block][head][size][D], brought into these layouts before use.
//
// Keys are taken in chunks of CHUNK from position 0 on. Inside a chunk: all scores, their maximum, 2^(s - max), the sum, and the
// weighted sum of V in ascending order; chunks are merged in ascending order. This does not depend on how many queries are
// looked at together or where a prompt was cut, so a row gets the same bits decoded, prefilled, chunked, alone or in a batch.
// Masked scores become -inf by selection and V rows past the end are not read: what was never written may hold NaN.
#pragma once
#include "matrix.h"

constexpr int CHUNK = 128;
constexpr int GROUPS = CHUNK / 16;
constexpr int MOST_HEAD_DIM = 256;  // decoder.py refuses more
constexpr int STRIP = 6;  // query rows that share one pass over the keys

struct Cache {  // one layer; mirrored by ctypes
  void *k, *v;
  float *k_scale, *v_scale;  // int8 only
};

struct Geometry {
  int heads, kv_heads, head_dim, block_size, kind;  // kind of the cache elements
  int block_rows;  // rows of head_dim from one block of a layer to the next: all layers' keys and values lie between them
  int group() const { return heads / kv_heads; }
  bool grouped() const { return block_size % 16 == 0; }
  size_t row(int block, int head, int offset) const { return (size_t)block * block_rows + head * block_size + offset; }
};

static INLINE float peak_of(const float *x, int n) {  // NaN if one of them is: compared as integers, it is the largest
  int32_t top = 0, bits;
  for (int i = 0; i < n; i++) memcpy(&bits, x + i, 4), top = std::max(top, bits & 0x7fffffff);
  float peak;
  memcpy(&peak, &top, 4);
  return peak;
}

// One key or value of `size` elements into its places: `step` between the groups of `pair` elements that stay together.
template <class E>
static INLINE void scatter(E *to, const E *x, int size, int step, int pair) {
  if (pair == 2)
    for (int i = 0; i < size; i += 2) to[(i / 2) * step] = x[i], to[(i / 2) * step + 1] = x[i + 1];
  else
    for (int i = 0; i < size; i++) to[i * step] = x[i];
}

template <class E>
static inline void put_token(const Geometry &g, const Cache &to, size_t row, int offset, const E *k, const E *v) {
  const int D = g.head_dim;
  constexpr int pair = Products<E>::STEP;
  E *kp = (E *)to.k, *vp = (E *)to.v;
  if (!g.grouped()) {
    memcpy((void *)(kp + row * D), k, sizeof(E) * D), memcpy((void *)(vp + row * D), v, sizeof(E) * D);
    return;
  }
  scatter(kp + (row - offset % 16) * D + offset % 16 * pair, k, D, 16 * pair, pair);
  scatter(vp + (row - offset % pair) * D + offset % pair, v, D, pair, 1);
}

// Key and value of one token and head into their slot.
static inline void store_token(const Geometry &g, const Cache &to, int block, int head, int offset, const float *k, const float *v) {
  const int D = g.head_dim;
  const size_t row = g.row(block, head, offset);
  if (g.kind == INT8) {
    int8_t bytes[2][MOST_HEAD_DIM];
    for (int side = 0; side < 2; side++) {
      const float *x = side ? v : k;
      const float peak = peak_of(x, D), inverse = inverse_scale(peak);
      (side ? to.v_scale : to.k_scale)[row] = peak * (1.f / 127.f);
      for (int d = 0; d < D; d++) bytes[side][d] = inverse > 0 ? (int8_t)std::nearbyintf(x[d] * inverse) : 0;
    }
    put_token(g, to, row, offset, bytes[0], bytes[1]);
  } else if (g.kind == BFLOAT16) {
    Paired rounded[2][MOST_HEAD_DIM];
    for (int d = 0; d < D; d += 16) {
      store_bf16(rounded[0] + d, round_bf16(load(k + d)));
      store_bf16(rounded[1] + d, round_bf16(load(v + d)));
    }
    put_token(g, to, row, offset, rounded[0], rounded[1]);
  } else {
    put_token(g, to, row, offset, k, v);
  }
}

template <class E>
struct Keys {  // up to CHUNK keys of one head: addresses of groups of 16
  const E *k[GROUPS], *v[GROUPS];
  const E *ahead[GROUPS];  // keys that are looked at next
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
    keys.ahead[i] = keys.k[i];
    if (g.kind == INT8) keys.k_scale[i] = c.k_scale + row, keys.v_scale[i] = c.v_scale + row;
  }
}

// Brought together in `room` (2 * CHUNK * D elements), where blocks are no multiple of 16. Not for int8.
template <class E>
static inline void gather(Keys<E> &keys, E *room, const Geometry &g, const Cache &c, const int32_t *table, int head, int from, int count) {
  const int D = g.head_dim;
  constexpr int pair = Products<E>::STEP;
  E *k = room, *v = room + CHUNK * D;
  keys.count = count;
  for (int i = 0; i * 16 < count; i++) keys.k[i] = keys.ahead[i] = k + i * 16 * D, keys.v[i] = v + i * 16 * D;
  for (int t = 0; t < count; t++) {
    const size_t row = g.row(table[(from + t) / g.block_size], head, (from + t) % g.block_size);
    scatter(k + t / 16 * 16 * D + t % 16 * pair, as<E>(c.k) + row * D, D, 16 * pair, pair);
    scatter(v + t / pair * pair * D + t % pair, as<E>(c.v) + row * D, D, pair, 1);
  }
}

// Where a chunk of keys is: in the cache, or in `room` where it had to be brought together.
template <class E>
static INLINE void find(Keys<E> &keys, float *room, const Geometry &g, const Cache &c, const int32_t *table, int head, int from, int count) {
  if constexpr (sizeof(E) > 1)
    if (!g.grouped()) return gather(keys, (E *)room, g, c, table, head, from, count);
  point(keys, g, c, table, head, from, count);
}

// Floats as queries for a cache of E.
template <class E>
static INLINE void put_query(typename Products<E>::Other *to, const float *x, int size) {
  if constexpr (Products<E>::STEP == 2)
    for (int d = 0; d < size; d += 16) store_factors(to + d, load(x + d));
  else
    memcpy(to, x, sizeof(float) * size);
}

// Sixteens of sums that each of M rows keeps in registers.
constexpr int columns_of(int rows) { return VECTOR_BYTES == 64 ? 4 : rows <= 3 ? 2 : 1; }

// scores[m][key] of N groups from `first` on.
template <int M, int N, class E>
static INLINE void score_groups(const typename Products<E>::Other *q, int D, const Keys<E> &keys, int first, float *scores) {
  typedef Products<E> P;
  f32x16 sum[M][N] = {};
  const E *k[N], *v[N];
  for (int j = 0; j < N; j++) k[j] = keys.k[first + j], v[j] = keys.v[first + j];
  constexpr int BYTES = 16 * P::STEP * (int)sizeof(E);
  for (int d = 0; d < D / P::STEP; d++) {
    if (BYTES >= 64 || d % (64 / BYTES) == 0)  // the values of these keys, a line at a time between the arithmetic
      for (int j = 0; j < N; j++) __builtin_prefetch((const char *)v[j] + d * BYTES, 0, 3);
    typename P::Many x[N];
    for (int j = 0; j < N; j++) x[j] = P::many(k[j] + d * 16 * P::STEP);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      const typename P::Many b = P::spread(q + m * D + d * P::STEP);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) sum[m][j] = P::add(sum[m][j], x[j], b);
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < N; j++) {
      if constexpr (sizeof(E) == 1) sum[m][j] *= load(keys.k_scale[first + j]);
      store(scores + m * CHUNK + (first + j) * 16, sum[m][j]);
    }
}

template <int M, int N, class E>
static INLINE void weigh_values(const typename Products<E>::Other *weights, const Keys<E> &keys, int D, int column, float *out) {
  typedef Products<E> P;
  constexpr int BYTES = 16 * P::STEP * (int)sizeof(E);
  f32x16 sum[M][N] = {};
  auto add = [&](int t, bool first_only) __attribute__((always_inline)) {
    const E *v = keys.v[t / 16] + (t % 16) * D + column * P::STEP;
    typename P::Many x[N];
    for (int j = 0; j < N; j++) x[j] = P::many(v + 16 * P::STEP * j);
    for (int i = 0; i < N * BYTES; i += 64) __builtin_prefetch((const char *)(keys.ahead[t / 16] + (t % 16) * D + column * P::STEP) + i, 0, 3);
    if (first_only)
      for (int j = 0; j < N; j++) x[j] = P::first_only(x[j]);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      const typename P::Many b = P::spread(weights + m * CHUNK + t);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) sum[m][j] = P::add(sum[m][j], x[j], b);
    }
  };
  int t = 0;
  for (; t + P::STEP <= keys.count; t += P::STEP) add(t, false);
  if (t < keys.count) add(t, true);  // its partner was never written
  for (int m = 0; m < M; m++)
    for (int j = 0; j < N; j++) store(out + m * D + column + 16 * j, sum[m][j]);
}

// One chunk of keys for M query rows `q` [M][D] (already times scale * log2 e). visible[m]: how many of the keys row m may see.
// Writes out [M][D], peak [M] and total [M]; a row that sees nothing gets peak -inf.
template <int M, class E>
static void attend(const typename Products<E>::Other *q, int D, const Keys<E> &keys, const int *visible, float *out, float *peak, float *total) {
  typedef Products<E> P;
  alignas(64) float scores[M * CHUNK];
  alignas(64) typename P::Other weights[M * CHUNK];
  const int groups = (keys.count + 15) / 16;
  constexpr int N = columns_of(M);
  int g = 0;
  for (; g + N <= groups; g += N) score_groups<M, N, E>(q, D, keys, g, scores);
  for (; g < groups; g++) score_groups<M, 1, E>(q, D, keys, g, scores);
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
      f32x16 e = exp2v(load(s + 16 * i) - base, P::STEP == 2 ? -56.f : -126.f);
      sum += e;
      if constexpr (sizeof(E) == 1) {
        f32x16 scaled = e * load(keys.v_scale[i]);
        e = select(e > splat(0.f), scaled, e);  // the scale of a slot that was never written may be anything
      }
      if constexpr (P::STEP == 2) store_plain_factors(weights + m * CHUNK + 16 * i, e);
      else store(weights + m * CHUNK + 16 * i, e);
    }
    total[m] = sum_lanes(sum);
  }
  int column = 0;
  for (; column + 16 * N <= D; column += 16 * N) weigh_values<M, N, E>(weights, keys, D, column, out);
  for (; column < D; column += 16) weigh_values<M, 1, E>(weights, keys, D, column, out);
}

template <class E>
static void attend_rows(int rows, const typename Products<E>::Other *q, int D, const Keys<E> &keys, const int *visible, float *out,
                        float *peak, float *total) {
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

// Fold one chunk's result into the running one of up to 16 rows; the same whoever computed it, and how many at once.
static INLINE void merge(int rows, Running *state, float *sums, const float *parts, size_t stride, const float *peaks, const float *totals, int D) {
  float before[16] = {}, after[16] = {}, keep[16], add[16];
  for (int m = 0; m < rows; m++) {
    const float top = std::max(state[m].peak, peaks[m]);
    before[m] = state[m].peak - top, after[m] = peaks[m] - top;
  }
  store(keep, exp2v(load(before))), store(add, exp2v(load(after)));
  for (int m = 0; m < rows; m++) {
    if (peaks[m] == -INFINITY) continue;  // it saw nothing
    state[m].total = fmaf(state[m].total, keep[m], totals[m] * add[m]);
    state[m].peak = std::max(state[m].peak, peaks[m]);
    float *sum = sums + m * D;
    const float *part = parts + m * stride;
    for (int d = 0; d < D; d += 16) store(sum + d, fma(load(part + d), splat(add[m]), load(sum + d) * keep[m]));
  }
}
static INLINE void divide(const Running &state, const float *sum, float *out, int D) {
  f32x16 inverse = splat(1.f / state.total);
  for (int d = 0; d < D; d += 16) store(out + d, load(sum + d) * inverse);
}

// --- a decoding row: one task per (row, KV head, chunk) ---------------------------------------------------------------------

// The keys of one task. `room`: 2 * CHUNK * D elements.
template <class E>
static void decode_keys(Keys<E> &keys, const Geometry &g, const Cache &c, const int32_t *table, int head, int length, int chunk, float *room) {
  const int from = chunk * CHUNK;
  find(keys, room, g, c, table, head, from, std::min(CHUNK, length - from));
}

// part: [group][D + 2], the last two being peak and total. `room`: 2 * STRIP * D floats.
template <class E>
static void decode_chunk(const Geometry &g, const Keys<E> &keys, const float *q, float *part, float *room) {
  typedef typename Products<E>::Other Query;
  const int D = g.head_dim;
  Query *mine = (Query *)(room + STRIP * D);
  for (int r = 0; r < g.group(); r += STRIP) {
    int rows = std::min(STRIP, g.group() - r), visible[STRIP];
    float peak[STRIP], total[STRIP];
    for (int &v : visible) v = keys.count;
    put_query<E>(mine, q + r * D, rows * D);
    attend_rows<E>(rows, mine, D, keys, visible, room, peak, total);
    for (int m = 0; m < rows; m++) {
      float *to = part + (r + m) * (D + 2);
      memcpy(to, room + m * D, sizeof(float) * D);
      to[D] = peak[m], to[D + 1] = total[m];
    }
  }
}

static void decode_combine(const Geometry &g, const float *parts, int chunks, float *out, float *sum) {
  const int D = g.head_dim, stride = g.group() * (D + 2);
  for (int r = 0; r < g.group(); r++) {
    Running state{-INFINITY, 0};
    memset(sum, 0, sizeof(float) * D);
    for (int i = 0; i < chunks; i++) {
      const float *p = parts + (size_t)i * stride + r * (D + 2);
      merge(1, &state, sum, p, D, p + D, p + D + 1, D);
    }
    divide(state, sum, out + r * D, D);
  }
}

// --- a prompt: one task per (sequence, KV head, tile of queries) --------------------------------------------------------------

constexpr int TILE_ROWS = 96;
static INLINE int queries_per_tile(const Geometry &g) { return std::max(1, TILE_ROWS / g.group()); }
static INLINE size_t prompt_room(const Geometry &g) {  // floats of scratch that a thread needs
  size_t rows = (size_t)queries_per_tile(g) * g.group() + STRIP;
  return 2 * CHUNK * g.head_dim + 2 * rows * g.head_dim + 2 * STRIP * g.head_dim + 2 * rows + 64;
}

// Queries [first, last) of one sequence; query i stands at position `start + i`. q and out: row i, head h at i * stride + h * D.
template <class E>
static void prompt_tile(const Geometry &g, const Cache &c, const int32_t *table, int head, int start, int first, int last,
                        const float *q, size_t q_stride, float *out, size_t out_stride, float *room) {
  typedef typename Products<E>::Other Query;
  const int D = g.head_dim, G = g.group(), rows = (last - first) * G, end = start + last;
  Query *mine = (Query *)(room + 2 * CHUNK * D);
  float *sums = room + 2 * CHUNK * D + (rows + STRIP) * D, *part = sums + (rows + STRIP) * D;
  Running *state = (Running *)(part + STRIP * D);
  for (int r = 0; r < rows; r++) {
    put_query<E>(mine + r * D, q + (first + r / G) * q_stride + (head * G + r % G) * D, D);
    memset(sums + r * D, 0, sizeof(float) * D);
    state[r] = {-INFINITY, 0};
  }
  for (int from = 0; from < end; from += CHUNK) {
    const int count = std::min(CHUNK, end - from);
    Keys<E> keys;
    find(keys, room, g, c, table, head, from, count);
    for (int r = 0; r < rows; r += STRIP) {
      int strip = std::min(STRIP, rows - r), visible[STRIP], most = 0;
      float peak[STRIP], total[STRIP];
      for (int m = 0; m < strip; m++) {
        visible[m] = std::max(0, std::min(count, start + first + (r + m) / G + 1 - from));
        most = std::max(most, visible[m]);
      }
      if (!most) continue;
      keys.count = most;  // keys that no row of the strip can see need not be looked at
      attend_rows<E>(strip, mine + r * D, D, keys, visible, part, peak, total);
      merge(strip, state + r, sums + r * D, part, D, peak, total, D);
    }
  }
  for (int r = 0; r < rows; r++) divide(state[r], sums + r * D, out + (first + r / G) * out_stride + (head * G + r % G) * D, D);
}
