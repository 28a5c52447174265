// One clock for deadlines and traces.
#pragma once

#include <chrono>
#include <cstdint>

namespace farandole {

// Nanoseconds of the steady clock; comparable between the processes of one host, not between hosts.
[[nodiscard]] inline uint64_t now_ns() {
  const auto since_boot = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since_boot).count());
}

}  // namespace farandole
