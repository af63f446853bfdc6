// What the library shows to the outside: plain C, structures of addresses and sizes, no ownership.
#pragma once
#include "attention.h"
#include "matrix.h"
#include "sampling.h"

struct Layer {  // this and the next two are mirrored by ctypes in library.py
  Matrix qkv, out, gate_up, down;
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
  Cache cache;
};
struct Model {
  const Layer *layers;
  Matrix embedding, head;
  const float *final_norm;
  const float *cos_sin;  // [positions][head_dim]: cosines, then sines
  int32_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, block_size, cache_kind;
  float eps;
  int32_t threads, block_rows, pad;
};
struct Batch {
  int32_t sequences, tokens, sampled, table_width;
  const int32_t *token_ids;   // [tokens]
  const int32_t *query_lens;  // [sequences] new tokens of each
  const int32_t *seq_lens;    // [sequences] tokens once this step is done
  const int32_t *tables;      // [sequences][table_width] block ids
  const int32_t *last_rows;   // [sampled] rows that get logits
  float *logits;              // [sampled][head.channels]
  const int32_t *pooled_rows;  // [pooled] rows whose hidden states are wanted
  float *pooled_states;       // [pooled][hidden], after the last norm
  int32_t pooled, pad;
};

extern "C" {
const char *minivllm_isa();
int minivllm_group();
int minivllm_sizes(int which);
void minivllm_argmax(const float *x, int rows, int size, size_t stride, int64_t *best, int threads);
void minivllm_sample(const float *x, int rows, int size, size_t stride, const Draw *draws, int64_t *tokens, int threads);
void minivllm_linear(const Matrix *w, const float *x, int rows, int size, float *y, int end, int threads);
void *minivllm_decoder_new(const Model *model);
void minivllm_decoder_free(void *decoder);
void minivllm_decoder_seconds(void *decoder, double *of_pieces);
int minivllm_decoder_run(void *decoder, const Batch *batch);
}
