// The processor's cycle counter, for very frequent events. Reading it takes a third of the time of reading the clock.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace farandole {

/// Counts up at a steady rate, which TickScale measures.
[[nodiscard]] inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#else
  return now_ns();
#endif
}

/// Converts ticks into nanoseconds of now_ns(), for ticks between construction and the last adjust(). The rate is
/// measured over that whole time, so the error is only that of reading two clocks one after the other.
class TickScale {
 public:
  TickScale() : ticks_(ticks()), ns_(now_ns()) {}

  void adjust() {
    const uint64_t passed = ticks() - ticks_;
    if (passed > 0) rate_ = static_cast<double>(now_ns() - ns_) / static_cast<double>(passed);
  }

  [[nodiscard]] uint64_t ns_of(uint64_t at) const {
    const double passed = static_cast<double>(static_cast<int64_t>(at - ticks_));
    return ns_ + static_cast<uint64_t>(static_cast<int64_t>(passed * rate_));
  }

 private:
  uint64_t ticks_;
  uint64_t ns_;
  double rate_ = 1;
};

}  // namespace farandole
