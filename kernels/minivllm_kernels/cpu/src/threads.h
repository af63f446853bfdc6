// One small pool of threads for all engines of the process: the caller is thread 0. Workers spin for a few microseconds after a
// job, since the next one usually follows at once, then sleep in the kernel: an idle engine costs nothing.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>

static inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins while `done()` is false; gives the core away now and then, in case the partner needs it.
template <class F>
static inline void spin_until(F &&done) {
  for (int k = 1; !done(); k++) {
    pause_cpu();
    if (k % 2048 == 0) sched_yield();
  }
}

class Barrier {
 public:
  void resize(int n) { size_ = n; }
  int size() const { return size_; }
  void wait() {
    if (size_ == 1) return;
    uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)size_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    } else {
      spin_until([&] { return round_.load(std::memory_order_acquire) != round; });
    }
  }

 private:
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  int size_ = 1;
};

class Pool {
 public:
  // The child of a fork has none of its parent's threads, and perhaps a mutex that one of them held: it gets a new pool.
  Pool() {
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, renew);
  }

  // Runs job(thread, barrier) on `n` threads, the caller among them. One job at a time: a second caller waits.
  template <class F>
  void run(int n, const F &job) {
    std::lock_guard<std::mutex> only(mutex_);
    start(n);
    barrier.resize(n);
    if (n == 1) return job(0);
    function_ = [](void *context, int thread) { (*(const F *)context)(thread); };
    context_ = (void *)&job;
    done_.store(0, std::memory_order_relaxed);
    generation_.store(((generation_.load(std::memory_order_relaxed) >> SIZE_BITS) + 1) << SIZE_BITS | (uint32_t)n, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst)) generation_.notify_all();
    job(0);
    spin_until([&] { return done_.load(std::memory_order_acquire) == (uint32_t)n - 1; });
  }

  Barrier barrier;

 private:
  static constexpr int SPINS = 4000;
  static constexpr int SIZE_BITS = 10;

  static void renew();

  void start(int n) {
    for (; started_ < n - 1; started_++) {
      uint32_t seen = generation_.load();
      std::thread([this, id = started_ + 1, seen] { work(id, seen); }).detach();
    }
  }

  void work(int id, uint32_t seen) {
    for (;;) {
      for (int k = 0; generation_.load(std::memory_order_acquire) == seen; k++) {
        if (k < SPINS) {
          pause_cpu();
          continue;
        }
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        generation_.wait(seen, std::memory_order_seq_cst);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        k = 0;
      }
      // The number of the job and how many threads it wants are one word: a worker that overslept a job without it takes up
      // the newest, and nobody waits for one that is not wanted.
      seen = generation_.load(std::memory_order_acquire);
      if (id >= (int)(seen & ((1u << SIZE_BITS) - 1))) continue;
      function_(context_, id);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> sleeping_{0};
  void (*function_)(void *, int) = nullptr;
  void *context_ = nullptr;
  int started_ = 0;
  std::mutex mutex_;
};

extern Pool pool;
inline void Pool::renew() { new (&pool) Pool(); }

// Thread `id` of `n` gets [begin, end) of `count`.
struct Share {
  int begin, end;
  Share(int count, int id, int n) : begin((int)((int64_t)count * id / n)), end((int)((int64_t)count * (id + 1) / n)) {}
};

// `count` pieces of work, `chunk` at a time. Each thread has a range of its own, so that what it asks memory for in advance is what it
// will need, and helps the others when it is through: a core that a neighbour slows down does less.
struct alignas(64) Counter {
  std::atomic<int> next;
};
template <class F>
static inline void share_out(Counter *counters, int count, int chunk, int id, int n, F &&work) {  // a counter for each thread, all 0
  for (int i = 0; i < n; i++) {
    const int owner = (id + i) % n;
    const Share part(count, owner, n);
    for (;;) {
      const int first = part.begin + counters[owner].next.fetch_add(chunk, std::memory_order_relaxed);
      if (first >= part.end) break;
      work(first, first + chunk < part.end ? first + chunk : part.end);
    }
  }
}
