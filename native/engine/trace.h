#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace farandole {

/// What the timeline shows: one phase of one operation. Times are those of now_ns().
struct TraceEvent {
  std::string name;
  const char* phase;
  uint64_t begin_ns;
  uint64_t end_ns;
  uint64_t bytes;
};

/// Events since the last drain; off unless switched on. Keeps at most a million and counts the rest.
class Trace {
 public:
  explicit Trace(bool on) : on_(on) {}

  [[nodiscard]] bool on() const { return on_; }

  void add(TraceEvent event) {
    const std::lock_guard lock(mu_);
    if (events_.size() < kMost) events_.push_back(std::move(event));
    else ++dropped_;
  }

  [[nodiscard]] std::vector<TraceEvent> drain() {
    const std::lock_guard lock(mu_);
    return std::exchange(events_, {});
  }

  [[nodiscard]] uint64_t dropped() {
    const std::lock_guard lock(mu_);
    return dropped_;
  }

 private:
  static constexpr size_t kMost = 1'000'000;
  bool on_;
  std::mutex mu_;
  std::vector<TraceEvent> events_;
  uint64_t dropped_ = 0;
};

}  // namespace farandole
