// A paged cache of one layer: where keys, values and queries lie, and how they get there.
//
// Per block and KV head, other layers' blocks between two of its own: K transposed in groups of 16 tokens, [block][head][size/16][D][16],
// so that one load brings one coordinate of 16 keys; V [block][head][size][D]. Elements float, bf16, or int8 with one float scale per
// token and head, [block][head][size]. Of bf16 and int8, what is summed lies in pairs: K [block][head][size/16][D/2][16][2], V
// [block][head][size/2][D][2]; queries are rounded to bf16. Block sizes that 16 does not divide: [block][head][size][D], brought into
// these layouts before use. Queries of a step: [KV head][row][query head of the group][D].
#pragma once
#include "rows.h"

constexpr int CHUNK = 128;
constexpr int GROUPS = CHUNK / 16;
constexpr int MOST_HEAD_DIM = 256;  // decoder.py refuses more

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

// Bytes of a key or value, and the scale that makes values of them.
static inline float quantize_head(const float *x, int8_t *bytes, int size) {
  i32x16 top = {};
  for (int d = 0; d < size; d += 16) top = vmax(abs_bits(load(x + d)), top);
  const float peak = peak_lanes(top), inverse = inverse_scale(peak);
  if (!(inverse > 0.f)) memset(bytes, 0, size);
  else for (int d = 0; d < size; d += 16) store_bytes(bytes + d, round_to_int(load(x + d) * splat(inverse)));
  return peak * (1.f / 127.f);
}

// A key into slot 0..15 of its group: `pair` coordinates stay together, the next ones are 16 pairs further on.
template <class E>
static INLINE void put_in_group(E *group, int slot, const E *k, int D) {
  constexpr int pair = Products<E>::STEP;
  for (int d = 0; d < D; d += pair) memcpy((void *)(group + (size_t)d * 16 + slot * pair), k + d, sizeof(E) * pair);
}
template <class E>
static INLINE void put_key(const Geometry &g, void *to, size_t row, int offset, const E *k) {
  E *p = (E *)to;
  if (g.grouped()) put_in_group(p + (row - offset % 16) * g.head_dim, offset % 16, k, g.head_dim);
  else memcpy((void *)(p + row * g.head_dim), k, sizeof(E) * g.head_dim);
}
// In pairs a value lies between those of its partner, the token before or after it, which another thread may be storing: only its
// own bytes are written.
template <class E>
static INLINE void put_paired_value(const Geometry &g, void *to, size_t row, int offset, const E *v) {
  const int odd = offset % 2;
  E *p = (E *)to + (row - odd) * g.head_dim;
  for (int d = 0; d < g.head_dim; d += 16) {
#if VECTOR_BYTES == 64
    if constexpr (sizeof(E) == 1) {
      const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(v + d)));
      _mm256_mask_storeu_epi8(p + 2 * d, odd ? 0xaaaaaaaa : 0x55555555, odd ? _mm256_slli_epi16(words, 8) : words);
    } else {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(v + d)));
      _mm512_mask_storeu_epi16(p + 2 * d, odd ? 0xaaaaaaaa : 0x55555555, odd ? _mm512_slli_epi32(wide, 16) : wide);
    }
#else
    for (int i = 0; i < 16; i++) p[2 * (d + i) + odd] = v[d + i];
#endif
  }
}

template <class E>
static INLINE void put_head(const Geometry &g, const Cache &to, bool value, size_t row, int offset, const E *x) {
  if (!value) return put_key(g, to.k, row, offset, x);
  if constexpr (Products<E>::STEP == 2)
    if (g.grouped()) return put_paired_value(g, to.v, row, offset, x);
  memcpy((void *)((E *)to.v + row * g.head_dim), x, sizeof(E) * g.head_dim);
}

// The key or value of one token and head into its slot.
static inline void store_head(const Geometry &g, const Cache &to, bool value, int block, int head, int offset, const float *x) {
  const int D = g.head_dim;
  const size_t row = g.row(block, head, offset);
  if (g.kind == INT8) {
    Byte bytes[MOST_HEAD_DIM];
    (value ? to.v_scale : to.k_scale)[row] = quantize_head(x, &bytes->value, D);
    put_head(g, to, value, row, offset, bytes);
  } else if (g.kind == BFLOAT16) {
    Paired rounded[MOST_HEAD_DIM];
    for (int d = 0; d < D; d += 16) store_rounded(rounded + d, load(x + d));
    put_head(g, to, value, row, offset, rounded);
  } else {
    put_head(g, to, value, row, offset, x);
  }
}

// --- queries ------------------------------------------------------------------------------------------------------------------

static INLINE size_t query_bytes(const Geometry &g) { return g.kind == FLOAT32 ? sizeof(float) : sizeof(Factor); }
static INLINE size_t query_at(const Geometry &g, int rows, int row, int head) {  // elements before it
  return (((size_t)(head / g.group()) * rows + row) * g.group() + head % g.group()) * g.head_dim;
}
static inline void store_query(const Geometry &g, void *queries, size_t at, const float *x) {
  if (g.kind == FLOAT32) return (void)memcpy((float *)queries + at, x, sizeof(float) * g.head_dim);
  for (int d = 0; d < g.head_dim; d += 16) store_factors((Factor *)queries + at + d, load(x + d));
}

// --- reading ------------------------------------------------------------------------------------------------------------------

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
    put_in_group(k + t / 16 * 16 * D, t % 16, as<E>(c.k) + row * D, D);
    for (int d = 0; d < D; d++) v[t / pair * pair * D + t % pair + d * pair] = as<E>(c.v)[row * D + d];
  }
}

// Where a chunk of keys is: in the cache, or in `room` where it had to be brought together.
template <class E>
static INLINE void find(Keys<E> &keys, float *room, const Geometry &g, const Cache &c, const int32_t *table, int head, int from, int count) {
  if constexpr (!has_scales<E>)
    if (!g.grouped()) return gather(keys, (E *)room, g, c, table, head, from, count);
  point(keys, g, c, table, head, from, count);
}

#if defined(DOT_TAKES_PAIRS)
// Bytes as bfloat16 numbers, in `room` (2 * CHUNK * D of them), for many queries.
static inline void widen(Keys<Widened> &wide, float *room, const Keys<Byte> &keys, int D) {
  wide.count = keys.count;
  for (int i = 0; i * 16 < keys.count; i++) {
    Widened *k = (Widened *)room + i * 16 * D, *v = k + CHUNK * D;
    for (int at = 0; at < 16 * D; at += 32) {
      _mm512_storeu_si512(k + at, Products<Byte>::many(keys.k[i] + at));
      _mm512_storeu_si512(v + at, Products<Byte>::many(keys.v[i] + at));
    }
    wide.k[i] = wide.ahead[i] = k, wide.v[i] = v, wide.k_scale[i] = keys.k_scale[i], wide.v_scale[i] = keys.v_scale[i];
  }
}
#endif
