// A whole decoder step in one call: embedding, layers, output layer, over a paged cache.
//
// Covers the Llama family: RMSNorm before attention and MLP, rotary positions (NeoX), grouped-query attention with optional
// biases (Qwen2) and per-head q/k norms (Qwen3), SwiGLU. All threads walk through the layers together, with a barrier between
// stages. Rows are tokens of all sequences, side by side; every stage treats a row by itself, so results do not depend on company.
#pragma once
#include <memory>
#include <vector>
#include "abi.h"
#include "memory.h"
#include "norms.h"
#include "plan.h"
#include "thread_count.h"

enum Piece { EMBED, NORMS, QKV, ROTARY, ATTENTION, OUT, GATE_UP, DOWN, ROUNDING, HEAD, PIECES };  // named in decoder.py

class Activations {  // Rows and their memory
 public:
  void grow(size_t rows, int depth) {
    const size_t values = rows * depth, groups = rows * (depth / GROUP4 + 1);
    floats_.grow(values), bytes_.grow(values), scales_.grow(groups), fixes_.grow(groups);
  }
  Rows rows() { return {floats_.data(), bytes_.data(), scales_.data(), fixes_.data()}; }

 private:
  Buffer<float> floats_, scales_;
  Buffer<int8_t> bytes_;
  Buffer<int32_t> fixes_;
};

class Decoder {
 public:
  explicit Decoder(const Model &model)
      : m_(model),
        geometry_{model.heads, model.kv_heads, model.head_dim, model.block_size, model.cache_kind, model.block_rows} {
    layers_.assign(model.layers, model.layers + model.num_layers);
    rooms_.resize(model.threads);
    for (auto &room : rooms_) room.resize(std::max(attention_room(geometry_), (size_t)model.hidden));
  }

  void run(const Batch &batch) {
    prepare(batch);
    const auto begin = Clock::now();
    waited_ = {};
    last_ = begin;
    pool.run(threads_, [&](int id) {
      embed(batch, id);
      for (int i = 0; i < m_.num_layers; i++) layer(batch, layers_[i], STAGES * i, id);
      if (batch.pooled) pool_states(batch, id);
      if (batch.sampled) head(batch, STAGES * m_.num_layers, id);
    });
    took(HEAD, Clock::now());
    threads_.adapt(waited_, last_ - begin);
  }

  void seconds(double *of_pieces) {  // of all steps since the last call
    for (int i = 0; i < PIECES; i++) of_pieces[i] = std::chrono::duration<double>(spent_[i]).count(), spent_[i] = {};
  }

 private:
  static constexpr int STAGES = 5;  // of a layer: those whose work threads take from counters

  void prepare(const Batch &b) {
    const size_t rows = b.tokens;
    const Layer &l = layers_[0];
    const int wide = m_.heads * m_.head_dim;
    inputs_.grow(rows, std::max({l.qkv.depth, l.out.depth, l.gate_up.depth, l.down.depth, m_.head.depth}));
    x_.grow(rows * m_.hidden), qkv_.grow(rows * l.qkv.channels), queries_.grow(rows * wide), attended_.grow(rows * wide);
    activated_.grow(rows * m_.intermediate);
    plan_.make(b, geometry_);
    parts_.grow(plan_.tasks.size() * geometry_.group() * (m_.head_dim + 2));
    const int counters = (STAGES * m_.num_layers + 1) * m_.threads;
    if (!counters_) counters_ = std::make_unique<Counter[]>(counters);
    for (int i = 0; i < counters; i++) counters_[i].next.store(0, std::memory_order_relaxed);
  }

  Counter *counters_of(int stage) { return &counters_[stage * m_.threads]; }

  void sync(int id, Piece done) {
    if (id) return pool.barrier.wait();
    const auto begin = Clock::now();
    pool.barrier.wait();
    const auto now = Clock::now();
    waited_ += now - begin;
    took(done, now);
  }
  void took(Piece piece, Clock::time_point now) { spent_[piece] += now - last_, last_ = now; }

  void embed(const Batch &b, int id) {
    Share mine(b.tokens, id, threads_);
    for (int r = mine.begin; r < mine.end; r++) unpack_channel(m_.embedding, b.token_ids[r], x_.data() + (size_t)r * m_.hidden, m_.hidden);
    sync(id, EMBED);
  }

  void normalize(const Batch &b, const float *weight, const Matrix &into, int id) {
    float *room = rooms_[id].data();
    Share mine(b.tokens, id, threads_);
    for (int r = mine.begin; r < mine.end; r++) {
      rms_norm_row(x_.data() + (size_t)r * m_.hidden, weight, m_.hidden, m_.eps, room);
      put_part((Kind)into.kind, inputs_.rows(), r, 0, room, m_.hidden, into.depth);
    }
    fetch_first(into, threads_, id);
    sync(id, NORMS);
  }

  void linear(const Batch &b, const Matrix &w, float *y, size_t stride, Epilogue end, int stage, Piece piece, int id) {
    multiply(inputs_.rows(), b.tokens, w, y, stride, end, threads_, id, counters_of(stage));
    sync(id, piece);
  }

  // Queries and keys are normalised and turned, keys and values stored: all where attention finds them.
  void rotate_and_store(const Batch &b, const Layer &l, int id) {
    const int D = m_.head_dim, heads = m_.heads + 2 * m_.kv_heads, width = l.qkv.channels;
    const float q_scale = LOG2E / std::sqrt((float)D);
    Share mine(b.tokens * heads, id, threads_);
    for (int i = mine.begin; i < mine.end;) {
      const int row = i / heads, h = i % heads, kv = h - m_.heads, position = plan_.position[row];
      const int alike = kv < 0 ? -kv : kv < m_.kv_heads ? m_.kv_heads - kv : 2 * m_.kv_heads - kv;  // heads from here on
      const int count = std::min({alike, 16, mine.end - i});
      float *x = qkv_.data() + (size_t)row * width + h * D;
      const float *norm = kv < 0 ? l.q_norm : kv < m_.kv_heads ? l.k_norm : nullptr;
      if (norm) rms_norm_rows(x, D, count, norm, D, m_.eps);
      const int block = b.tables[(size_t)plan_.sequence[row] * b.table_width + position / m_.block_size];
      for (int k = 0; k < count; k++, x += D) {
        if (kv < m_.kv_heads) rotate_row(x, m_.cos_sin + (size_t)position * D, D, kv < 0 ? q_scale : 1.f);
        if (kv < 0) store_query(geometry_, queries_.data(), query_at(geometry_, b.tokens, row, h + k), x);
        else store_head(geometry_, l.cache, kv >= m_.kv_heads, block, (kv + k) % m_.kv_heads, position % m_.block_size, x);
      }
      i += count;
    }
    sync(id, ROTARY);
  }

  template <class E>
  void attend_all(const Batch &b, const Layer &l, int stage, int id) {
    typedef typename Products<E>::Other Query;
    const int D = m_.head_dim, G = geometry_.group();
    float *room = rooms_[id].data();
    const Query *queries = (const Query *)queries_.data();
    Share mine((int)plan_.tasks.size(), id, threads_);
    const bool in_place = has_scales<E> || geometry_.grouped();
    Keys<E> keys[2];  // of this task and, where they lie in the cache, of the next one
    auto find_keys = [&](int i) {
      const Plan::Task &t = plan_.tasks[i];
      const int s = plan_.sequence[t.row], from = t.chunk * CHUNK;
      find(keys[i & 1], room + STRIP * D, geometry_, l.cache, b.tables + (size_t)s * b.table_width, t.head, from, std::min(CHUNK, b.seq_lens[s] - from));
    };
    for (int i = mine.begin; i < mine.end; i++) {
      if (i == mine.begin || !in_place) find_keys(i);
      Keys<E> &now = keys[i & 1], &next = keys[~i & 1];
      if (in_place && i + 1 < mine.end) {
        find_keys(i + 1);
        for (int k = 0; k * 16 < now.count; k++) now.ahead[k] = next.k[std::min(k, (next.count - 1) / 16)];
      }
      const Plan::Task &t = plan_.tasks[i];
      decode_chunk(geometry_, now, queries + query_at(geometry_, b.tokens, t.row, t.head * G), parts_.data() + (size_t)i * G * (D + 2), room);
    }
    for (;;) {
      const int i = counters_of(stage)->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= (int)plan_.tiles.size()) break;
      const Plan::Tile &t = plan_.tiles[i];
      const int s = t.sequence, row = plan_.start[s];
      prompt_tile<E>(geometry_, l.cache, b.tables + (size_t)s * b.table_width, t.head, b.seq_lens[s] - b.query_lens[s], t.first, t.last,
                     queries + query_at(geometry_, b.tokens, row + t.first, t.head * G),
                     [&](int query, const float *x) { put_attended(l, row + query, t.head, x); }, room);
    }
    if (!plan_.single.empty()) {
      sync(id, ATTENTION);
      Share singles((int)plan_.single.size(), id, threads_);
      for (int i = singles.begin; i < singles.end; i++)
        for (int h = 0; h < m_.kv_heads; h++) {
          const int first = plan_.first_task[i * m_.kv_heads + h], chunks = plan_.first_task[i * m_.kv_heads + h + 1] - first;
          decode_combine(geometry_, parts_.data() + (size_t)first * G * (D + 2), chunks, room);
          put_attended(l, plan_.single[i], h, room);
        }
    }
    if (!whole_groups(l)) {
      sync(id, ATTENTION);
      round_rows(b, attended_.data(), m_.heads * m_.head_dim, l.out, id);
    }
    fetch_first(l.out, threads_, id);
    sync(id, ATTENTION);
  }

  // Whether what the query heads of one KV head attended to can be made bytes by itself.
  bool whole_groups(const Layer &l) const { return geometry_.group() * m_.head_dim % unit_of(l.out.kind) == 0; }

  void put_attended(const Layer &l, int row, int kv_head, const float *x) {  // [group][D]
    const int size = geometry_.group() * m_.head_dim;
    if (whole_groups(l)) put_part((Kind)l.out.kind, inputs_.rows(), row, kv_head * size, x, size, l.out.depth);
    else memcpy(attended_.data() + ((size_t)row * m_.kv_heads + kv_head) * size, x, sizeof(float) * size);
  }

  void round_rows(const Batch &b, const float *x, int size, const Matrix &into, int id) {
    Share mine(b.tokens, id, threads_);
    for (int r = mine.begin; r < mine.end; r++)
      put_part((Kind)into.kind, inputs_.rows(), r, 0, x + (size_t)r * size, size, into.depth);
  }

  void round_activated(const Batch &b, const Layer &l, int id) {
    round_rows(b, activated_.data(), m_.intermediate, l.down, id);
    fetch_first(l.down, threads_, id);
    sync(id, ROUNDING);
  }

  void layer(const Batch &b, const Layer &l, int stage, int id) {
    normalize(b, l.input_norm, l.qkv, id);
    linear(b, l.qkv, qkv_.data(), l.qkv.channels, STORE, stage, QKV, id);
    rotate_and_store(b, l, id);
    if (m_.cache_kind == INT8) attend_all<Byte>(b, l, stage + 1, id);
    else if (m_.cache_kind == BFLOAT16) attend_all<Paired>(b, l, stage + 1, id);
    else attend_all<float>(b, l, stage + 1, id);
    linear(b, l.out, x_.data(), m_.hidden, ADD, stage + 2, OUT, id);
    normalize(b, l.post_norm, l.gate_up, id);
    linear(b, l.gate_up, activated_.data(), m_.intermediate, SILU_MUL, stage + 3, GATE_UP, id);
    round_activated(b, l, id);
    linear(b, l.down, x_.data(), m_.hidden, ADD, stage + 4, DOWN, id);
  }

  void pool_states(const Batch &b, int id) {
    Share mine(b.pooled, id, threads_);
    for (int r = mine.begin; r < mine.end; r++)
      rms_norm_row(x_.data() + (size_t)b.pooled_rows[r] * m_.hidden, m_.final_norm, m_.hidden, m_.eps, b.pooled_states + (size_t)r * m_.hidden);
  }

  void head(const Batch &b, int stage, int id) {
    float *room = rooms_[id].data();
    Share mine(b.sampled, id, threads_);
    for (int r = mine.begin; r < mine.end; r++) {
      rms_norm_row(x_.data() + (size_t)b.last_rows[r] * m_.hidden, m_.final_norm, m_.hidden, m_.eps, room);
      put_part((Kind)m_.head.kind, inputs_.rows(), r, 0, room, m_.hidden, m_.head.depth);
    }
    fetch_first(m_.head, threads_, id);
    sync(id, HEAD);
    multiply(inputs_.rows(), b.sampled, m_.head, b.logits, m_.head.channels, STORE, threads_, id, counters_of(stage));
  }

  Model m_;
  Geometry geometry_;
  std::vector<Layer> layers_;
  Plan plan_;
  Activations inputs_;  // of the next product
  Buffer<float> x_, qkv_, queries_, attended_, activated_, parts_;
  std::vector<std::vector<float>> rooms_;  // scratch of each thread
  std::unique_ptr<Counter[]> counters_;    // of each stage and thread

  ThreadCount threads_{m_.threads};
  Clock::duration waited_{};            // of thread 0 in this step, at barriers
  Clock::duration spent_[PIECES] = {};  // of thread 0, by what it ended
  Clock::time_point last_;
};
