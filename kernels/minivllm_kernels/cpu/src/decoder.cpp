// The library's plain C interface (abi.h): no torch, no ownership of what callers bring.
#include <new>
#include <system_error>
#include "decoder.h"

Pool pool;

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
  for (int r = 0; r < rows; r++) put_part((Kind)w->kind, room, r, 0, x + (size_t)r * size, size, w->depth);
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
