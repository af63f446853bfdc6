// What this machine can do at most: reading memory, products of bytes, of bfloat16 pairs, fused multiply-adds. Compiled and called by
// bench_machine.py, with the kernels' own primitives, so that a floor is that of the instruction set in use.
#include <chrono>
#include <thread>
#include <vector>
#include "dot.h"

template <class F>
static double seconds(int threads, F work) {  // of all threads together, from the first start to the last end
  std::vector<std::thread> others;
  auto begin = std::chrono::steady_clock::now();
  for (int id = 1; id < threads; id++) others.emplace_back([&, id] { work(id); });
  work(0);
  for (auto &other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <class V>
static void keep(const V &value) {  // the compiler must not see that a result is unused
  asm volatile("" : : "m"(value) : "memory");
}

extern "C" {
const char *machine_isa() { return ISA_NAME; }

// Reads `bytes` (a multiple of 256 * threads) `times` times, every thread its own part.
double machine_read(const float *data, size_t bytes, int times, int threads) {
  const size_t part = bytes / sizeof(float) / threads;
  return seconds(threads, [&](int id) {
    const float *p = data + id * part;
    for (int t = 0; t < times; t++) {
      f32x16 a = {}, b = {}, c = {}, d = {};
      for (size_t i = 0; i + 64 <= part; i += 64) {
        __builtin_prefetch(p + i + 1024, 0, 3);
        __builtin_prefetch(p + i + 1040, 0, 3);
        __builtin_prefetch(p + i + 1056, 0, 3);
        __builtin_prefetch(p + i + 1072, 0, 3);
        a = vmax(load(p + i), a), b = vmax(load(p + i + 16), b), c = vmax(load(p + i + 32), c), d = vmax(load(p + i + 48), d);
      }
      keep(a), keep(b), keep(c), keep(d);
    }
  });
}

// `times` x 12 products of 64 bytes with 64 bytes on every thread, all in registers.
double machine_dot(long times, int threads) {
  return seconds(threads, [&](int id) {
    uint8_t bytes[64];
    for (int i = 0; i < 64; i++) bytes[i] = (uint8_t)(i * 3 + id);
    weights64 w = load_weights(bytes);
    i32x16 sum[12];
    for (int i = 0; i < 12; i++) sum[i] = splat_i32(i + id);  // all different, or the compiler computes one of them
    for (long t = 0; t < times; t++) {
      int32_t four = (int32_t)t & 0x3f3f3f3f;
#pragma GCC unroll 12
      for (int i = 0; i < 12; i++) sum[i] = dot4(sum[i], w, four);
    }
    for (auto &one : sum) keep(one);
  });
}

// `times` x 12 x 2 products of sixteen bfloat16 numbers on every thread, all in registers.
double machine_pairs(long times, int threads) {
  return seconds(threads, [&](int id) {
    typedef Products<Paired> P;
    float ones[32];
    for (float &one : ones) one = 1.f + (float)id;
    Paired weights[32];
    Factor factors[16];
    for (int i = 0; i < 32; i += 16) store_bf16(weights + i, load(ones));
    store_factors(factors, load(ones));
    const P::Many w = P::many(weights);
    f32x16 sum[12];
    for (int i = 0; i < 12; i++) sum[i] = splat((float)(i + id));
    for (long t = 0; t < times; t++) {
      const P::Many x = P::spread(factors + (t & 7) * 2);
#pragma GCC unroll 12
      for (int i = 0; i < 12; i++) sum[i] = P::add(sum[i], w, x);
    }
    for (auto &one : sum) keep(one);
  });
}

// `times` x 12 fused multiply-adds of sixteen floats on every thread, all in registers.
double machine_fma(long times, int threads) {
  return seconds(threads, [&](int id) {
    f32x16 x = splat(0.5f + (float)id), sum[12];
    for (int i = 0; i < 12; i++) sum[i] = splat((float)(i + id));
    for (long t = 0; t < times; t++) {
      f32x16 y = splat((float)(t & 7));
#pragma GCC unroll 12
      for (int i = 0; i < 12; i++) sum[i] = fma(x, y, sum[i]);
    }
    for (auto &one : sum) keep(one);
  });
}
}
