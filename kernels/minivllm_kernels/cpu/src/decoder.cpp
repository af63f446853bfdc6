// A whole decoder step in one call: embedding, layers, output layer, over a paged cache. Plain C interface, no torch.
//
// Covers the Llama family: RMSNorm before attention and MLP, rotary positions (NeoX), grouped-query attention with optional
// biases (Qwen2) and per-head q/k norms (Qwen3), SwiGLU. All threads walk through the layers together, with a barrier between
// stages. Rows are tokens of all sequences, side by side; every stage treats a row by itself, so results do not depend on company.
#include <chrono>
#include <memory>
#include <new>
#include <system_error>
#include <vector>
#include "abi.h"
#include "memory.h"
#include "threads.h"

Pool pool;

static INLINE void rms_norm_row(const float *x, const float *weight, int size, float eps, float *out) {
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
  f32x16 scale = splat(1.f / std::sqrt(sum_lanes(even + odd) / (float)size + eps));
  for (i = 0; i < size; i += 16) store(out + i, load(x + i) * scale * load(weight + i));
}

static INLINE void rotate_row(const float *x, const float *cos_sin, int D, float scale, float *out) {
  const int half = D / 2;
  for (int i = 0; i < half; i++) {  // half may be no multiple of 16 (head size 80)
    float c = cos_sin[i] * scale, s = cos_sin[half + i] * scale, a = x[i], b = x[half + i];
    out[i] = a * c - b * s;
    out[half + i] = b * c + a * s;
  }
}

using Clock = std::chrono::steady_clock;

enum Piece { EMBED, NORMS, QKV, ROTARY, ATTENTION, OUT, GATE_UP, DOWN, ROUNDING, HEAD, PIECES };  // named in decoder.py

class Decoder {
 public:
  explicit Decoder(const Model &model) : m_(model), geometry_{model.heads, model.kv_heads, model.head_dim, model.block_size, model.cache_kind, model.block_rows} {
    layers_.assign(model.layers, model.layers + model.num_layers);
    rooms_.resize(model.threads);
    for (auto &room : rooms_) room.resize(std::max(prompt_room(geometry_), (size_t)model.hidden));
  }

  void run(const Batch &batch) {
    prepare(batch);
    const auto begin = Clock::now();
    waited_ = {};
    last_ = begin;
    pool.run(threads_, [&](int id) {
      embed(batch, id);
      for (int i = 0; i < m_.num_layers; i++) layer(batch, layers_[i], 5 * i, id);
      if (batch.pooled) pool_states(batch, id);
      if (batch.sampled) head(batch, 5 * m_.num_layers, id);
    });
    took(HEAD, Clock::now());
    adapt(last_ - begin);
  }

  void seconds(double *of_pieces) {  // of all steps since the last call
    for (int i = 0; i < PIECES; i++) of_pieces[i] = std::chrono::duration<double>(spent_[i]).count(), spent_[i] = {};
  }

 private:
  struct Task {
    int row, head, chunk;
  };
  struct Tile {
    int sequence, head, first, last;
  };

  void prepare(const Batch &b) {
    const size_t rows = b.tokens;
    int widest = std::max(std::max(m_.hidden, m_.intermediate), m_.heads * m_.head_dim);
    for (const Layer &l : {layers_[0]}) widest = std::max(std::max(widest, l.qkv.depth), std::max(l.out.depth, l.down.depth));
    const size_t groups = rows * (widest / GROUP4 + 1);
    x_.grow(rows * m_.hidden), qkv_.grow(rows * layers_[0].qkv.channels), attended_.grow(rows * m_.heads * m_.head_dim);
    activated_.grow(rows * m_.intermediate), floats_.grow(rows * widest), bytes_.grow(rows * widest);
    scales_.grow(groups), fixes_.grow(groups);
    sequence_.resize(rows), position_.resize(rows);
    tasks_.clear(), tiles_.clear(), first_task_.clear(), single_.clear(), start_.clear();
    int row = 0;
    for (int s = 0; s < b.sequences; s++) {
      const int length = b.seq_lens[s], fresh = b.query_lens[s];
      start_.push_back(row);
      for (int i = 0; i < fresh; i++) sequence_[row + i] = s, position_[row + i] = length - fresh + i;
      if (fresh == 1) {
        single_.push_back(row);
        for (int h = 0; h < m_.kv_heads; h++) {
          first_task_.push_back((int)tasks_.size());
          for (int c = 0; c * CHUNK < length; c++) tasks_.push_back({row, h, c});
        }
      } else {
        const int step = queries_per_tile(geometry_);
        for (int i = (fresh - 1) / step * step; i >= 0; i -= step)  // the long ones first
          for (int h = 0; h < m_.kv_heads; h++) tiles_.push_back({s, h, i, std::min(fresh, i + step)});
      }
      row += fresh;
    }
    first_task_.push_back((int)tasks_.size());
    parts_.grow(tasks_.size() * geometry_.group() * (m_.head_dim + 2));
    const int counters = (5 * m_.num_layers + 1) * m_.threads;
    if (!counters_) counters_ = std::make_unique<Counter[]>(counters);
    for (int i = 0; i < counters; i++) counters_[i].next.store(0, std::memory_order_relaxed);
  }

  Counter *counters_of(int stage) { return &counters_[stage * m_.threads]; }

  Rows rows() { return {floats_.data(), bytes_.data(), scales_.data(), fixes_.data()}; }
  void sync(int id, Piece done) {
    if (id) return pool.barrier.wait();
    const auto begin = Clock::now();
    pool.barrier.wait();
    const auto now = Clock::now();
    waited_ += now - begin;
    took(done, now);
  }
  void took(Piece piece, Clock::time_point now) { spent_[piece] += now - last_, last_ = now; }

  // Where other programs want the cores, threads wait for one that is not running, at every barrier: fewer threads are then
  // faster. The number is halved after a few steps of mostly waiting and tried again later, less and less often.
  void adapt(Clock::duration took) {
    patience_ = waited_ * 5 > took * 2 ? patience_ - 1 : PATIENCE;
    if (patience_ == 0 && threads_ > 1) {
      threads_ /= 2;
      patience_ = PATIENCE;
      pause_ = std::min(pause_ * 2, 512);
      until_next_try_ = pause_;
    } else if (threads_ < m_.threads && --until_next_try_ == 0) {
      threads_ = std::min(m_.threads, threads_ * 2);
      until_next_try_ = pause_;
    } else if (threads_ == m_.threads && patience_ == PATIENCE && pause_ > 16 && ++good_steps_ % 64 == 0) {
      pause_ /= 2;
    }
  }

  void put(const Matrix &w, size_t row, const float *x, int size) { put_row((Kind)w.kind, rows(), row, x, size, w.depth); }

  void embed(const Batch &b, int id) {
    const Matrix &w = m_.embedding;
    Share mine(b.tokens, id, threads_);
    for (int r = mine.begin; r < mine.end; r++) {
      const int token = b.token_ids[r], lane = token % PANEL;
      const size_t at = (size_t)(token / PANEL) * PANEL * w.depth;
      float *x = x_.data() + (size_t)r * m_.hidden;
      if (w.kind == INT8) {
        const uint8_t *p = (const uint8_t *)w.data + at + lane * 4;
        const float scale = w.scale[token];
        for (int k = 0; k < m_.hidden; k++) x[k] = ((int)p[(k / 4) * 128 + k % 4] - 128) * scale;
      } else if (w.kind == BFLOAT16 || w.kind == BFLOAT16_DOT) {
        const BF16 *p = (const BF16 *)w.data + at;
        for (int k = 0; k < m_.hidden; k++) {
          const size_t place = w.kind == BFLOAT16 ? (size_t)k * PANEL + lane : (size_t)(k / 2) * 2 * PANEL + 2 * lane + k % 2;
          uint32_t bits = (uint32_t)p[place].bits << 16;
          memcpy(x + k, &bits, 4);
        }
      } else {
        const float *p = (const float *)w.data + at + lane;
        for (int k = 0; k < m_.hidden; k++) x[k] = p[(size_t)k * PANEL];
      }
    }
    sync(id, EMBED);
  }

  void normalize(const Batch &b, const float *weight, const Matrix &into, int id) {
    float *room = rooms_[id].data();
    Share mine(b.tokens, id, threads_);
    for (int r = mine.begin; r < mine.end; r++) {
      rms_norm_row(x_.data() + (size_t)r * m_.hidden, weight, m_.hidden, m_.eps, room);
      put(into, r, room, m_.hidden);
    }
    fetch_first(into, threads_, id);
    sync(id, NORMS);
  }

  void linear(const Batch &b, const Matrix &w, float *y, size_t stride, Epilogue end, int stage, Piece piece, int id) {
    multiply(rows(), b.tokens, w, y, stride, end, threads_, id, counters_of(stage));
    sync(id, piece);
  }

  void rotate_and_store(const Batch &b, const Layer &l, int id) {
    const int D = m_.head_dim, heads = m_.heads + m_.kv_heads, width = l.qkv.channels;
    const float q_scale = LOG2E / std::sqrt((float)D);
    float *room = rooms_[id].data();
    Share mine(b.tokens * heads, id, threads_);
    for (int i = mine.begin; i < mine.end; i++) {
      const int row = i / heads, h = i % heads, position = position_[row];
      float *x = qkv_.data() + (size_t)row * width + h * D;
      const bool is_q = h < m_.heads;
      const float *norm = is_q ? l.q_norm : l.k_norm;
      const float *source = x;
      if (norm) rms_norm_row(x, norm, D, m_.eps, room), source = room;
      float *turned = is_q && norm ? x : room + D;
      rotate_row(source, m_.cos_sin + (size_t)position * D, D, is_q ? q_scale : 1.f, turned);
      if (is_q) {
        if (turned != x) memcpy(x, turned, sizeof(float) * D);
        continue;
      }
      const int kv = h - m_.heads;
      const int block = b.tables[(size_t)sequence_[row] * b.table_width + position / m_.block_size];
      store_token(geometry_, l.cache, block, kv, position % m_.block_size, turned, x + m_.kv_heads * D);
    }
    sync(id, ROTARY);
  }

  template <class E>
  void attend_all(const Batch &b, const Layer &l, int stage, int id) {
    const int D = m_.head_dim, G = geometry_.group(), width = l.qkv.channels;
    float *room = rooms_[id].data();
    Share mine((int)tasks_.size(), id, threads_);
    const bool in_place = sizeof(E) == 1 || geometry_.grouped();
    Keys<E> keys[2];  // of this task and, where they lie in the cache, of the next one
    auto find_keys = [&](int i) {
      const Task &t = tasks_[i];
      const int s = sequence_[t.row];
      decode_keys(keys[i & 1], geometry_, l.cache, b.tables + (size_t)s * b.table_width, t.head, b.seq_lens[s], t.chunk, room + 2 * STRIP * D);
    };
    for (int i = mine.begin; i < mine.end; i++) {
      if (i == mine.begin || !in_place) find_keys(i);
      Keys<E> &now = keys[i & 1], &next = keys[~i & 1];
      if (in_place && i + 1 < mine.end) {
        find_keys(i + 1);
        for (int k = 0; k * 16 < now.count; k++) now.ahead[k] = next.k[std::min(k, (next.count - 1) / 16)];
      }
      const Task &t = tasks_[i];
      decode_chunk(geometry_, now, qkv_.data() + (size_t)t.row * width + t.head * G * D, parts_.data() + (size_t)i * G * (D + 2), room);
    }
    for (;;) {
      const int i = counters_of(stage)->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= (int)tiles_.size()) break;
      const Tile &t = tiles_[i];
      const size_t row = start_[t.sequence];
      prompt_tile<E>(geometry_, l.cache, b.tables + (size_t)t.sequence * b.table_width, t.head,
                     b.seq_lens[t.sequence] - b.query_lens[t.sequence], t.first, t.last, qkv_.data() + row * width, width,
                     attended_.data() + row * m_.heads * D, (size_t)m_.heads * D, room);
    }
    sync(id, ATTENTION);
    Share singles((int)single_.size(), id, threads_);
    for (int i = singles.begin; i < singles.end; i++)
      for (int h = 0; h < m_.kv_heads; h++) {
        const int first = first_task_[i * m_.kv_heads + h], chunks = first_task_[i * m_.kv_heads + h + 1] - first;
        decode_combine(geometry_, parts_.data() + (size_t)first * G * (D + 2), chunks,
                       attended_.data() + (size_t)single_[i] * m_.heads * D + h * G * D, room);
      }
    sync(id, ATTENTION);
  }

  void quantize(const Batch &b, const float *x, int size, const Matrix &into, int id) {
    Share mine(b.tokens, id, threads_);
    for (int r = mine.begin; r < mine.end; r++) put(into, r, x + (size_t)r * size, size);
    fetch_first(into, threads_, id);
    sync(id, ROUNDING);
  }

  void layer(const Batch &b, const Layer &l, int stage, int id) {
    normalize(b, l.input_norm, l.qkv, id);
    linear(b, l.qkv, qkv_.data(), l.qkv.channels, STORE, stage, QKV, id);
    rotate_and_store(b, l, id);
    if (m_.cache_kind == INT8) attend_all<int8_t>(b, l, stage + 1, id);
    else if (m_.cache_kind == BFLOAT16) attend_all<Paired>(b, l, stage + 1, id);
    else attend_all<float>(b, l, stage + 1, id);
    quantize(b, attended_.data(), m_.heads * m_.head_dim, l.out, id);
    linear(b, l.out, x_.data(), m_.hidden, ADD, stage + 2, OUT, id);
    normalize(b, l.post_norm, l.gate_up, id);
    linear(b, l.gate_up, activated_.data(), m_.intermediate, SILU_MUL, stage + 3, GATE_UP, id);
    quantize(b, activated_.data(), m_.intermediate, l.down, id);
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
      put(m_.head, r, room, m_.hidden);
    }
    fetch_first(m_.head, threads_, id);
    sync(id, HEAD);
    multiply(rows(), b.sampled, m_.head, b.logits, m_.head.channels, STORE, threads_, id, counters_of(stage));
  }

  Model m_;
  Geometry geometry_;
  std::vector<Layer> layers_;
  Buffer<float> x_, qkv_, attended_, activated_, floats_, scales_, parts_;
  Buffer<int8_t> bytes_;
  Buffer<int32_t> fixes_;
  std::vector<std::vector<float>> rooms_;  // scratch of each thread
  std::vector<int> sequence_, position_;   // of each row
  std::vector<Task> tasks_;                // decoding rows: one per KV head and chunk of keys
  std::vector<int> first_task_, single_;   // where the tasks of (single row, head) begin; rows of decoding sequences
  std::vector<Tile> tiles_;                // prompts
  std::vector<int> start_;                 // first row of each sequence
  std::unique_ptr<Counter[]> counters_;    // of each stage and thread

  static constexpr int PATIENCE = 3;
  int threads_ = m_.threads;  // at the moment, of those that were asked for
  Clock::duration waited_{};  // of thread 0 in this step, at barriers
  Clock::duration spent_[PIECES] = {};  // of thread 0, by what it ended
  Clock::time_point last_;
  int patience_ = PATIENCE, pause_ = 16, until_next_try_ = 0, good_steps_ = 0;
};

extern "C" {
const char *minivllm_isa() { return ISA_NAME; }
int minivllm_group() { return GROUP; }
int minivllm_sizes(int which) {  // checked against ctypes at load
  const int sizes[] = {sizeof(Matrix), sizeof(Cache), sizeof(Layer), sizeof(Model), sizeof(Batch), sizeof(Draw)};
  return sizes[which];
}
// Index of the largest of `size` values in each row; a NaN is larger than anything, the lower index wins a tie.
void minivllm_argmax(const float *x, int rows, int size, size_t stride, int64_t *best, int threads) {
  if (rows * (int64_t)size < 65536) threads = 1;
  auto job = [&](int id) {
    Share mine(rows, id, threads);
    for (int r = mine.begin; r < mine.end; r++) best[r] = argmax_row(x + r * stride, size);
  };
  try {
    pool.run(threads, job);
  } catch (const std::system_error &) {  // no thread to be had: alone, then
    threads = 1;
    job(0);
  }
}
// One matrix product by itself, for tests and benchmarks: x [rows][size] -> y [rows][channels], or half of them after SILU_MUL.
void minivllm_linear(const Matrix *w, const float *x, int rows, int size, float *y, int end, int threads) {
  const size_t places = (size_t)rows * w->depth, groups = (size_t)rows * (w->depth / GROUP4 + 1);
  std::vector<float> floats(places), scales(groups);
  std::vector<int8_t> bytes(places);
  std::vector<int32_t> fixes(groups);
  const Rows room{floats.data(), bytes.data(), scales.data(), fixes.data()};
  for (int r = 0; r < rows; r++) put_row((Kind)w->kind, room, r, x + (size_t)r * size, size, w->depth);
  const auto counters = std::make_unique<Counter[]>(threads);
  const size_t stride = end == SILU_MUL ? w->channels / 2 : w->channels;
  pool.run(threads, [&](int id) { multiply(room, rows, *w, y, stride, (Epilogue)end, threads, id, counters.get()); });
}
void minivllm_sample(const float *x, int rows, int size, size_t stride, const Draw *draws, int64_t *tokens, int threads) {
  threads = std::max(1, std::min(threads, rows));
  auto job = [&](int id) {
    Sampler sampler;
    Share mine(rows, id, threads);
    for (int r = mine.begin; r < mine.end; r++) tokens[r] = sampler.draw(x + r * stride, size, draws[r]);
  };
  try {
    pool.run(threads, job);
  } catch (const std::system_error &) {  // as above
    threads = 1;
    job(0);
  }
}
void *minivllm_decoder_new(const Model *model) {  // null: no memory
  try {
    return new Decoder(*model);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}
void minivllm_decoder_free(void *decoder) { delete (Decoder *)decoder; }
void minivllm_decoder_seconds(void *decoder, double *of_pieces) { ((Decoder *)decoder)->seconds(of_pieces); }
int minivllm_decoder_run(void *decoder, const Batch *batch) {  // 0, or 1: no memory, or 2: no thread
  try {
    ((Decoder *)decoder)->run(*batch);
    return 0;
  } catch (const std::bad_alloc &) {
    return 1;
  } catch (const std::system_error &) {
    return 2;
  }
}
}
