// Choosing a token of each row: the largest, or one drawn from what temperature, min_p, top_k and top_p leave. A row needs one pass
// over the vocabulary for the weights and one or two more to find the few tokens that matter; nothing is sorted whole.
#pragma once
#include <algorithm>
#include <vector>
#include "vec.h"

struct Draw {  // mirrored by ctypes in library.py
  double uniform;  // in [0, 1)
  float temperature, top_p, min_p;
  int32_t top_k;  // 0: all
};

// Index of the largest of `size` values; a NaN is larger than anything, the lower index wins a tie.
static int64_t argmax_row(const float *x, int size) {
  f32x16 top = splat(-INFINITY);
  i32x16 nan = splat_i32(0);
  int i = 0;
  for (; i + 16 <= size; i += 16) {
    const f32x16 v = load(x + i);
    nan |= v != v;
    top = vmax(v, top);
  }
  float peak = max_lanes(top);
  for (int j = i; j < size; j++) peak = x[j] > peak ? x[j] : peak;
  bool any = sum_lanes(nan) != 0;
  for (int j = i; j < size; j++) any |= x[j] != x[j];
  if (any)
    for (int j = 0; j < size; j++)
      if (x[j] != x[j]) return j;
  for (i = 0; i + 16 <= size; i += 16)
    if (sum_lanes(load(x + i) == splat(peak)) != 0) break;
  for (; i < size; i++)
    if (x[i] == peak) return i;
  return 0;
}

class Sampler {  // with room that is used again for the next row
 public:
  int64_t draw(const float *x, int size, const Draw &d) {
    weigh(x, size, x[argmax_row(x, size)], d);
    const bool limited = d.top_k > 0 && d.top_k < size;
    if (!limited && d.top_p >= 1.f) return pick_from_all(size, d.uniform);
    collect(size, limited ? d.top_k : 0, d.top_p);
    auto likelier = [this](int a, int b) { return weight_[a] != weight_[b] ? weight_[a] > weight_[b] : a < b; };
    if (limited && (int)kept_.size() > d.top_k) {
      std::nth_element(kept_.begin(), kept_.begin() + d.top_k, kept_.end(), likelier);
      kept_.resize(d.top_k);
    }
    if (d.top_p < 1.f) {
      double all = limited ? mass(0, kept_.size()) : total_;
      keep_mass((double)d.top_p * all, likelier);
    }
    std::sort(kept_.begin(), kept_.end());
    const double target = d.uniform * mass(0, kept_.size());
    double reached = 0;
    for (int token : kept_)
      if ((reached += weight_[token]) > target) return token;
    return kept_.back();
  }

 private:
  // weight_ = e^((x - peak) / temperature), 1 at the peak, 0 below min_p; total_ their sum.
  void weigh(const float *x, int size, float peak, const Draw &d) {
    const int padded = (size + 15) & ~15;
    if ((int)weight_.size() < padded) weight_.resize(padded), sums_.resize(padded / BLOCK + 1);
    const float by = LOG2E / d.temperature;
    const f32x16 least = splat(d.min_p);
    total_ = 0;
    for (int block = 0, i = 0; i < padded; block++) {
      f32x16 sum = splat(0.f);
      for (const int end = std::min(padded, i + BLOCK); i < end; i += 16) {
        f32x16 v;
        if (i + 16 <= size) {
          v = load(x + i);
        } else {
          float last[16];
          for (int j = 0; j < 16; j++) last[j] = i + j < size ? x[i + j] : -INFINITY;
          v = load(last);
        }
        f32x16 w = exp2v((v - splat(peak)) * by);
        w = select(w < least, splat(0.f), w);
        store(&weight_[i], w);
        sum += w;
      }
      total_ += sums_[block] = sum_lanes(sum);
    }
  }

  int64_t pick_from_all(int size, double uniform) const {
    const double target = uniform * total_;
    double reached = 0;
    int block = 0;
    for (; (block + 1) * BLOCK < size && reached + sums_[block] <= target; block++) reached += sums_[block];
    int last = 0;
    for (int i = block * BLOCK; i < size; i++) {
      if (weight_[i] > 0) last = i;
      if ((reached += weight_[i]) > target && weight_[i] > 0) return i;
    }
    return last;  // rounding: the last token that has any weight
  }

  double mass(size_t from, size_t to) const {
    double sum = 0;
    for (; from < to; from++) sum += weight_[kept_[from]];
    return sum;
  }

  // Leaves in kept_ the likeliest tokens, each while those before it fall short of `wanted`; the likeliest always. Like
  // quickselect, by mass in place of number, so a flat distribution costs no sort.
  template <class F>
  void keep_mass(double wanted, F likelier) {
    size_t from = 0, to = kept_.size();  // tokens before `from` stay, tokens from `to` on go
    double before = 0;
    while (to - from > 32) {
      const int a = kept_[from], b = kept_[(from + to) / 2], c = kept_[to - 1];
      const int pivot = likelier(a, b) ? (likelier(b, c) ? b : likelier(a, c) ? c : a) : (likelier(a, c) ? a : likelier(b, c) ? c : b);
      const auto begin = kept_.begin();
      const size_t middle = std::partition(begin + from, begin + to, [&](int t) { return t == pivot || likelier(t, pivot); }) - begin;
      const double upper = mass(from, middle);
      if (middle == to) break;  // the pivot is the least likely: sort what is left
      if (before + upper >= wanted) to = middle;
      else before += upper, from = middle;
    }
    std::sort(kept_.begin() + from, kept_.begin() + to, likelier);
    while (from < to && (from == 0 || before < wanted)) before += weight_[kept_[from++]];
    kept_.resize(from);
  }

  // kept_: a set that surely holds every token that top_k or top_p will keep.
  void collect(int size, int top_k, float top_p) {
    for (const float least : {0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-18f, 0x1p-126f}) {
      kept_.clear();
      double mass = 0;
      const f32x16 bound = splat(least);
      for (int i = 0; i < size; i += 16) {
        if (sum_lanes(load(&weight_[i]) < bound) == -16) continue;
        for (int j = i; j < std::min(size, i + 16); j++)
          if (weight_[j] >= least) kept_.push_back(j), mass += weight_[j];
      }
      if (top_k ? (int)kept_.size() >= top_k : mass >= (double)top_p * total_) return;
    }
  }

  static constexpr int BLOCK = 1024;
  std::vector<float> weight_;
  std::vector<double> sums_;  // of blocks of weights
  double total_ = 0;
  std::vector<int> kept_;
};
