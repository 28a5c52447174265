#include "engine/device_marks.h"

#include <chrono>
#include <cstdint>
#include <thread>

#include "base/clock.h"
#include "base/error.h"

namespace farandole {
namespace {

constexpr std::chrono::microseconds kNap{100};
constexpr uint64_t kFarewell = 1'000'000'000;  // ns; limit of wait_briefly()

}  // namespace

bool passed(const Marks& marks) {
  return std::ranges::all_of(marks, [](const auto& mark) { return mark->passed(); });
}

void hold_for(const DeviceSide& side, CudaDevice::Stream stream) {
  for (const auto& mark : side.before) mark->hold(stream);
}

bool wait_briefly(const Marks& marks) noexcept {
  try {
    for (const uint64_t until = now_ns() + kFarewell; now_ns() < until; std::this_thread::sleep_for(kNap))
      if (passed(marks)) return true;
  } catch (const Error&) {
    // A broken device runs no copies, but it may have stopped in the middle of one.
  }
  return false;
}

}  // namespace farandole
