// One clock for deadlines and traces.
#pragma once

#include <chrono>
#include <cstdint>

namespace farandole {

// Nanoseconds of the steady clock. Comparable between processes of one host, not between hosts.
[[nodiscard]] inline uint64_t now_ns() {
  const auto since_boot = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since_boot).count());
}

// Converts nanoseconds to seconds.
[[nodiscard]] inline double seconds_of(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

}  // namespace farandole
