// Scratch in large pages where the system has them. Not for the cache: it grows by pages that are new, and on the machine that was
// measured being given a large one costs more than finding small ones (docs/performance.md).
#pragma once
#include <cstdlib>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#endif

constexpr size_t LARGE_PAGE = 2 << 20;

// Ask for large pages under this memory, not touched yet. A wish: where it is not granted nothing changes.
static inline void advise_large_pages(void *begin, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const size_t first = ((size_t)begin + 4095) / 4096 * 4096, last = ((size_t)begin + bytes) / 4096 * 4096;
  if (last > first) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}

// Scratch of plain numbers that only ever grows; its content is lost when it does, and not initialised.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() { free(data_); }
  T *data() { return data_; }
  void grow(size_t size) {
    if (size <= size_) return;
    size_t bytes = (size + size / 4) * sizeof(T);
    const size_t page = bytes < LARGE_PAGE ? 64 : LARGE_PAGE;
    bytes = (bytes + page - 1) / page * page;
    free(data_);
    data_ = nullptr, size_ = 0;
    if (posix_memalign((void **)&data_, page, bytes)) throw std::bad_alloc();
    if (page == LARGE_PAGE) advise_large_pages(data_, bytes);
    size_ = bytes / sizeof(T);
  }

 private:
  T *data_ = nullptr;
  size_t size_ = 0;
};
