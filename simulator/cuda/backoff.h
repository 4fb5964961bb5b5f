// Waiting for another process without a signal from it: short sleeps that grow.
#pragma once
#include <algorithm>
#include <chrono>
#include <thread>

namespace simulator {

class Backoff {
 public:
  void pause() {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds_));
    microseconds_ = std::min(microseconds_ * 3 / 2, 500);
  }
  void reset() { microseconds_ = first; }

 private:
  static constexpr int first = 20;
  int microseconds_ = first;
};

} // namespace simulator
