// Causal attention over a paged cache (cache.h), for decoding rows and for prompts, in one arithmetic. Over a cache of bfloat16 or
// int8 queries and softmax weights are rounded to bfloat16, sums are floats.
//
// Keys are taken in chunks of CHUNK from position 0 on. Inside a chunk: all scores, their maximum, 2^(s - max), the sum, and the
// weighted sum of V in ascending order; chunks are merged in ascending order. This does not depend on how many queries are
// looked at together or where a prompt was cut, so a row gets the same bits decoded, prefilled, chunked, alone or in a batch.
// Masked scores become -inf by selection and V rows past the end are not read: what was never written may hold NaN.
#pragma once
#include "cache.h"

constexpr int STRIP = 6;  // query rows that share one pass over the keys

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
      if constexpr (has_scales<E>) sum[m][j] *= load(keys.k_scale[first + j]);
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
  if (N > 2 && g + 2 <= groups) score_groups<M, std::min(N, 2), E>(q, D, keys, g, scores), g += 2;
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
      if constexpr (has_scales<E>) {
        f32x16 scaled = e * load(keys.v_scale[i]);
        e = select(e > splat(0.f), scaled, e);  // the scale of a slot that was never written may be anything
        store_factors(weights + m * CHUNK + 16 * i, e);
      } else if constexpr (P::STEP == 2) {
        store_plain_factors(weights + m * CHUNK + 16 * i, e);
      } else {
        store(weights + m * CHUNK + 16 * i, e);
      }
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
static INLINE void divide(const Running &state, float *sum, int D) {
  f32x16 inverse = splat(1.f / state.total);
  for (int d = 0; d < D; d += 16) store(sum + d, load(sum + d) * inverse);
}

// --- a decoding row: one task per (row, KV head, chunk) ---------------------------------------------------------------------

// part: [group][D + 2], the last two being peak and total. `q`: [group][D]. `room`: STRIP * D floats.
template <class E>
static void decode_chunk(const Geometry &g, const Keys<E> &keys, const typename Products<E>::Other *q, float *part, float *room) {
  const int D = g.head_dim;
  for (int r = 0; r < g.group(); r += STRIP) {
    int rows = std::min(STRIP, g.group() - r), visible[STRIP];
    float peak[STRIP], total[STRIP];
    for (int &v : visible) v = keys.count;
    attend_rows<E>(rows, q + r * D, D, keys, visible, room, peak, total);
    for (int m = 0; m < rows; m++) {
      float *to = part + (r + m) * (D + 2);
      memcpy(to, room + m * D, sizeof(float) * D);
      to[D] = peak[m], to[D + 1] = total[m];
    }
  }
}

// out: [group][D].
static void decode_combine(const Geometry &g, const float *parts, int chunks, float *out) {
  const int D = g.head_dim, stride = g.group() * (D + 2);
  memset(out, 0, sizeof(float) * g.group() * D);
  for (int r = 0; r < g.group(); r++, out += D) {
    Running state{-INFINITY, 0};
    for (int i = 0; i < chunks; i++) {
      const float *p = parts + (size_t)i * stride + r * (D + 2);
      merge(1, &state, out, p, D, p + D, p + D + 1, D);
    }
    divide(state, out, D);
  }
}

// --- a prompt: one task per (sequence, KV head, tile of queries) --------------------------------------------------------------

constexpr int TILE_ROWS = 96;
static INLINE int queries_per_tile(const Geometry &g) { return std::max(1, TILE_ROWS / g.group()); }
static INLINE size_t attention_room(const Geometry &g) {  // floats of scratch that a thread needs
  const size_t rows = (size_t)queries_per_tile(g) * g.group();
  return (2 * CHUNK + rows + STRIP) * g.head_dim + 2 * rows + 64;
}

// Queries [first, last) of one sequence, `q` [last - first][group][D]; query i stands at position `start + i`. put(i, x [group][D])
// takes what query i attended to.
template <class E, class Put>
static void prompt_tile(const Geometry &g, const Cache &c, const int32_t *table, int head, int start, int first, int last,
                        const typename Products<E>::Other *q, const Put &put, float *room) {
  const int D = g.head_dim, G = g.group(), rows = (last - first) * G, end = start + last;
  float *sums = room + 2 * CHUNK * D, *part = sums + rows * D;
  Running *state = (Running *)(part + STRIP * D);
  memset(sums, 0, sizeof(float) * rows * D);
  for (int r = 0; r < rows; r++) state[r] = {-INFINITY, 0};
  auto attend_to = [&](auto &keys, int from) {
    typedef std::remove_cvref_t<decltype(*keys.k[0])> Element;
    const int count = keys.count;
    for (int r = 0; r < rows; r += STRIP) {
      int strip = std::min(STRIP, rows - r), visible[STRIP], most = 0;
      float peak[STRIP], total[STRIP];
      for (int m = 0; m < strip; m++) {
        visible[m] = std::max(0, std::min(count, start + first + (r + m) / G + 1 - from));
        most = std::max(most, visible[m]);
      }
      if (!most) continue;
      keys.count = most;  // keys that no row of the strip can see need not be looked at
      attend_rows<Element>(strip, q + r * D, D, keys, visible, part, peak, total);
      merge(strip, state + r, sums + r * D, part, D, peak, total, D);
    }
  };
  for (int from = 0; from < end; from += CHUNK) {
    Keys<E> keys;
    find(keys, room, g, c, table, head, from, std::min(CHUNK, end - from));
#if defined(DOT_TAKES_PAIRS)
    if constexpr (std::is_same_v<E, Byte>) {
      Keys<Widened> wide;
      widen(wide, room, keys, D);
      attend_to(wide, from);
      continue;
    }
#endif
    attend_to(keys, from);
  }
  for (int r = 0; r < rows; r++) divide(state[r], sums + r * D, D);
  for (int i = first; i < last; i++) put(i, sums + (i - first) * G * D);
}
