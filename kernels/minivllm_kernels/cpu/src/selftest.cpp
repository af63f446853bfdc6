// Prints digests of what the library computes, one a line: two machines, compilers or instruction sets that print the same have
// the same bits everywhere. Linked with the library that is to be tested; random numbers come from integers, so that no
// mathematical library plays a part. Used by tests/kernels/test_cpu_instruction_sets.py, also under an emulator.
#include <cinttypes>
#include <cstdio>
#include <deque>
#include <string>
#include <vector>
#include "abi.h"

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint32_t bits() {  // xorshift64*
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return (uint32_t)((state_ * 0x2545f4914f6cdd1du) >> 32);
  }
  int below(int n) { return (int)(bits() % (uint32_t)n); }
  float real() { return ((int32_t)(bits() >> 8) - (1 << 23)) * (1.f / (1 << 23)); }  // -1 … 1, exactly
  std::vector<float> reals(size_t n, float scale = 1.f, float around = 0.f) {
    std::vector<float> v(n);
    for (float &x : v) x = around + scale * real();
    return v;
  }

 private:
  uint64_t state_;
};

class Digest {  // FNV-1a of 32-bit words; every NaN counts as the same one
 public:
  void add(const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
      uint32_t word;
      memcpy(&word, x + i, 4);
      if (x[i] != x[i]) word = 0x7fc00000;
      value_ = (value_ ^ word) * 0x100000001b3u;
    }
  }
  void add(const f32x16 &v) {
    float x[16];
    store(x, v);
    add(x, 16);
  }
  void print(const std::string &name) const { printf("%s %016" PRIx64 "\n", name.c_str(), value_); }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// --- vec.h --------------------------------------------------------------------------------------------------------------------

static std::vector<float> special_values(Random &random) {
  std::vector<float> x = {0.f,    -0.f,     0.5f,    1.5f,     2.5f,    -0.5f,      -1.5f,   -2.5f,    1.f,     -1.f,     126.f,
                          -126.f, -125.99f, -126.1f, -1e-30f,  1e-40f,  -1e-40f,    87.f,    -87.f,    88.5f,   -88.5f,   1e5f,
                          -1e5f,  FLT_MAX,  FLT_MIN, -FLT_MAX, -FLT_MIN, INFINITY, -INFINITY, NAN, 0.49999997f, -0.49999997f};
  for (int i = 0; i < 4096; i++) x.push_back(random.real() * (i % 3 == 0 ? 1.f : i % 3 == 1 ? 20.f : 150.f));
  while (x.size() % 16) x.push_back(0.f);
  return x;
}

static void test_vectors() {
  Random random(1);
  const std::vector<float> x = special_values(random);
  Digest exponentials, silus, lanes, bytes, halves;
  for (size_t i = 0; i + 32 <= x.size(); i += 16) {
    const f32x16 a = load(&x[i]), b = load(&x[i + 16]);
    exponentials.add(exp2v(select(a > splat(126.f), -a, a))), silus.add(silu(a));
    lanes.add(fma(a, b, a)), lanes.add(vmax(a, b)), lanes.add(select(a < b, a * b, a / b));
    const float sums[] = {sum_lanes(a), max_lanes(a), (float)max_lanes(abs_bits(a))};
    lanes.add(sums, 3);
    if (i < 32) continue;  // from here on values are small enough for integers
    const i32x16 whole = round_to_int(a);
    lanes.add(to_float(whole)), lanes.add(floor_of(a));
    int8_t q[16];
    store_bytes(q, round_to_int(a * (127.f / 150.f)));
    bytes.add(load(q));
    const float total = (float)sum_lanes(whole);
    bytes.add(&total, 1);
  }
  std::vector<BF16> short_floats(x.size());
  for (size_t i = 0; i < x.size(); i += 16) store_rounded(&short_floats[i], load(&x[i]));
  for (size_t i = 0; i < short_floats.size(); i += 16) halves.add(load(&short_floats[i]));
  exponentials.print("exp2v"), silus.print("silu"), lanes.print("lanes"), bytes.print("bytes"), halves.print("bfloat16");
}

// --- matrices -----------------------------------------------------------------------------------------------------------------

static const char *const NAMES[] = {"float32", "bfloat16", "int8", "int4", "bfloat16_dot"};

struct Weights {  // random ones, in the packed layout of a kind, rounded up as packing does
  std::vector<uint8_t> data;
  std::vector<float> scale, bias;
  Matrix matrix;

  Weights(Random &random, int kind, int channels, int depth, bool with_bias) {
    const int multiple = kind == INT8 ? GROUP : kind == INT4 ? GROUP4 : kind == BFLOAT16_DOT ? 32 : 16;
    const int n = (channels + PANEL - 1) / PANEL * PANEL, k = (depth + multiple - 1) / multiple * multiple;
    const size_t places = (size_t)n * k;
    const float size = 1.5f / std::sqrt((float)depth);
    if (kind == FLOAT32) {
      const std::vector<float> values = random.reals(places, size);
      data.resize(4 * places);
      memcpy(data.data(), values.data(), data.size());
    } else if (kind == BFLOAT16 || kind == BFLOAT16_DOT) {
      data.resize(2 * places);
      for (size_t i = 0; i < places; i++) {
        const float value = random.real() * size;
        memcpy(&data[2 * i], (const char *)&value + 2, 2);  // little endian
      }
    } else if (kind == INT8) {
      data.resize(places);
      for (uint8_t &byte : data) byte = (uint8_t)(1 + random.below(255));
      scale = random.reals(n, size / 256, size / 127);
    } else {
      data.resize(places / (PANEL * GROUP4) * GROUP4_BYTES);
      for (uint8_t &byte : data) byte = (uint8_t)random.below(256);
      for (size_t group = 0; group < data.size(); group += GROUP4_BYTES)
        for (int i = 0; i < 2 * PANEL; i++) {  // half floats near 2^-7 for steps, near -2^-4 for least values
          const uint16_t half = (uint16_t)((i < PANEL ? 0x2000 : 0xac00) + random.below(0x400));
          memcpy(&data[group + 2 * i], &half, 2);
        }
    }
    if (with_bias) bias = random.reals(n, 0.3f);
    matrix = {data.data(), scale.empty() ? nullptr : scale.data(), bias.empty() ? nullptr : bias.data(), kind, n, k, 0};
  }
};

static void test_products(int kind) {
  Random random(2);
  Digest digest;
  const int shapes[][2] = {{32, 64}, {64, 200}, {160, 96}};
  for (auto [channels, depth] : shapes) {
    const Weights w(random, kind, channels, depth, depth != 64);
    for (int rows : {1, 2, 3, 5, 6, 7, 8, 13, 33})
      for (int end : {STORE, ADD, SILU_MUL}) {
        std::vector<float> x = random.reals((size_t)rows * depth, 3.f), y = random.reals((size_t)rows * w.matrix.channels);
        if (rows > 5) x[5 * depth + 7] = rows == 13 ? NAN : 1e30f, std::fill_n(&x[2 * depth], depth, 0.f);
        minivllm_linear(&w.matrix, x.data(), rows, depth, y.data(), end, rows == 8 ? 3 : 1);
        digest.add(y.data(), y.size());
      }
  }
  digest.print(std::string("product ") + NAMES[kind]);
}

// --- the decoder --------------------------------------------------------------------------------------------------------------

constexpr int LAYERS = 2, HIDDEN = 96, INNER = 112, VOCABULARY = 100, BLOCKS = 40;

struct Shape {
  int heads, kv_heads, head_dim;
};
constexpr Shape ODD = {7, 1, 48}, EVEN = {6, 2, 64};  // of the first, what a KV head attends to is no whole number of groups

struct Network {
  std::deque<Weights> matrices;
  std::deque<std::vector<float>> vectors;
  std::deque<std::vector<uint8_t>> caches;
  std::vector<Layer> layers;
  Model model;

  Network(int kind, int cache_kind, int block_size, const Shape &shape) {
    const int heads = shape.heads, kv_heads = shape.kv_heads, head_dim = shape.head_dim;
    Random random(3);
    auto matrix = [&](int n, int k, bool bias) { return matrices.emplace_back(random, kind, n, k, bias).matrix; };
    auto vector = [&](size_t n, float scale, float around) { return vectors.emplace_back(random.reals(n, scale, around)).data(); };
    auto poison = [&](size_t n, bool bytes) {  // what was never written: NaN, or any bytes with NaN for scales
      auto &room = caches.emplace_back(n * (bytes ? 1 : 4), (uint8_t)0xff);
      if (bytes) for (uint8_t &byte : room) byte = (uint8_t)random.below(256);
      return (void *)room.data();
    };
    const bool bytes = cache_kind == INT8;
    const size_t rows = (size_t)block_size * kv_heads, block_rows = 2 * LAYERS * rows, element = bytes ? 1 : cache_kind == BFLOAT16 ? 2 : 4;
    char *pool = (char *)poison(BLOCKS * block_rows * head_dim, bytes);
    float *scales = bytes ? (float *)poison(BLOCKS * block_rows, false) : nullptr;
    auto part = [&](int index) { return (void *)(pool + index * rows * head_dim * element); };
    for (int i = 0; i < LAYERS; i++) {
      Layer layer{};
      layer.qkv = matrix((heads + 2 * kv_heads) * head_dim, HIDDEN, true);
      layer.out = matrix(HIDDEN, heads * head_dim, false);
      layer.gate_up = matrix(2 * INNER, HIDDEN, false);
      layer.down = matrix(HIDDEN, INNER, true);
      layer.input_norm = vector(HIDDEN, 0.2f, 1.f), layer.post_norm = vector(HIDDEN, 0.2f, 1.f);
      if (i) layer.q_norm = vector(head_dim, 0.2f, 1.f), layer.k_norm = vector(head_dim, 0.2f, 1.f);
      layer.cache = {part(2 * i), part(2 * i + 1), nullptr, nullptr};
      if (bytes) layer.cache.k_scale = scales + 2 * i * rows, layer.cache.v_scale = scales + (2 * i + 1) * rows;
      layers.push_back(layer);
    }
    model.layers = layers.data();
    // Nobody keeps a vocabulary in four bits, and the library does not look it up there.
    model.embedding = model.head = matrices.emplace_back(random, kind == INT4 ? INT8 : kind, VOCABULARY, HIDDEN, false).matrix;
    model.final_norm = vector(HIDDEN, 0.2f, 1.f);
    model.cos_sin = vector((size_t)BLOCKS * block_size * head_dim, 1.f, 0.f);
    model.num_layers = LAYERS, model.hidden = HIDDEN, model.heads = heads, model.kv_heads = kv_heads;
    model.head_dim = head_dim, model.intermediate = INNER, model.block_size = block_size, model.cache_kind = cache_kind;
    model.eps = 1e-5f, model.threads = 2, model.block_rows = (int)block_rows;
  }
};

// Four sequences: a prompt in three pieces beside others, single tokens, and one that begins last.
static void test_decoder(int kind, int cache_kind, int block_size, const Shape &shape) {
  Network network(kind, cache_kind, block_size, shape);
  void *decoder = minivllm_decoder_new(&network.model);
  Random random(4);
  const int plan[][4] = {{60, 1, 17, 0}, {70, 1, 1, 0}, {5, 30, 1, 1}, {1, 1, 1, 20}, {1, 1, 0, 1}};
  const int first_block[] = {0, 10, 20, 30}, width = 10;
  int lengths[4] = {};
  Digest digest;
  for (const auto &step : plan) {
    std::vector<int32_t> tokens, queries, totals, tables, rows;
    for (int s = 0; s < 4; s++) {
      if (!step[s]) continue;
      for (int i = 0; i < step[s]; i++) tokens.push_back(random.below(VOCABULARY));
      lengths[s] += step[s];
      queries.push_back(step[s]), totals.push_back(lengths[s]);
      for (int b = 0; b < width; b++) tables.push_back(first_block[s] + (7 * b + 3) % width);  // shuffled
    }
    for (int32_t i = 0; i < (int32_t)tokens.size(); i++) rows.push_back(i);
    std::vector<float> logits(tokens.size() * network.model.head.channels, NAN);
    const Batch batch = {(int32_t)queries.size(), (int32_t)tokens.size(), (int32_t)rows.size(), width, tokens.data(),
                         queries.data(), totals.data(), tables.data(), rows.data(), logits.data()};
    if (minivllm_decoder_run(decoder, &batch)) printf("no memory or no thread\n");
    digest.add(logits.data(), logits.size());
    std::vector<int64_t> best(rows.size());
    minivllm_argmax(logits.data(), (int)rows.size(), VOCABULARY, network.model.head.channels, best.data(), 1);
    for (int64_t token : best) {
      const float value = (float)token;
      digest.add(&value, 1);
    }
  }
  minivllm_decoder_free(decoder);
  digest.print(std::string("decoder ") + NAMES[kind] + " weights, " + NAMES[cache_kind] + " cache, blocks of " + std::to_string(block_size) +
               ", heads of " + std::to_string(shape.head_dim));
}

static void test_sampling() {
  Random random(5);
  Digest digest;
  for (int size : {1, 17, 1000, 5000}) {
    constexpr int rows = 24;
    std::vector<float> logits = random.reals((size_t)rows * size, 6.f);
    std::vector<Draw> draws(rows);
    for (Draw &d : draws) {
      d.uniform = (random.real() + 1.0) / 2.001;
      d.temperature = 0.5f + 0.5f * random.real() + 0.01f;
      d.top_p = random.below(2) ? 1.f : 0.9f;
      d.min_p = random.below(3) ? 0.f : 0.02f;
      d.top_k = random.below(2) ? 0 : 1 + random.below(60);
    }
    std::vector<int64_t> tokens(rows);
    minivllm_sample(logits.data(), rows, size, size, draws.data(), tokens.data(), 2);
    for (int64_t token : tokens) {
      const float value = (float)token;
      digest.add(&value, 1);
    }
  }
  digest.print("sample");
}

int main() {
  printf("isa %s\n", minivllm_isa());
  test_vectors();
  test_sampling();
  for (int kind : {FLOAT32, BFLOAT16, INT8, INT4, BFLOAT16_DOT}) test_products(kind);
  for (int kind : {FLOAT32, BFLOAT16, INT8, INT4, BFLOAT16_DOT})
    for (int cache_kind : {FLOAT32, BFLOAT16, INT8})
      for (const Shape &shape : {ODD, EVEN}) test_decoder(kind, cache_kind, 16, shape);
  for (int cache_kind : {FLOAT32, BFLOAT16}) test_decoder(INT8, cache_kind, 24, ODD);
}
