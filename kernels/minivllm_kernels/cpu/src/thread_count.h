// How many threads a decoder uses at the moment, of those that were asked for.
//
// Where other programs want the cores, threads wait for one that is not running, at every barrier: fewer threads are then
// faster. The number is halved after a few steps of mostly waiting and tried again later, less and less often.
#pragma once
#include <algorithm>
#include <chrono>

using Clock = std::chrono::steady_clock;

class ThreadCount {
 public:
  explicit ThreadCount(int most) : most_(most), now_(most) {}
  operator int() const { return now_; }

  void adapt(Clock::duration waited, Clock::duration took) {  // of the first thread, in one step
    patience_ = waited * 5 > took * 2 ? patience_ - 1 : PATIENCE;
    if (patience_ == 0 && now_ > 1) {
      now_ /= 2;
      patience_ = PATIENCE;
      pause_ = std::min(pause_ * 2, 512);
      until_next_try_ = pause_;
    } else if (now_ < most_ && --until_next_try_ == 0) {
      now_ = std::min(most_, now_ * 2);
      until_next_try_ = pause_;
    } else if (now_ == most_ && patience_ == PATIENCE && pause_ > 16 && ++good_steps_ % 64 == 0) {
      pause_ /= 2;
    }
  }

 private:
  static constexpr int PATIENCE = 3;
  int most_, now_;
  int patience_ = PATIENCE, pause_ = 16, until_next_try_ = 0, good_steps_ = 0;
};
