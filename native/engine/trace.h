#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace farandole {

/// What the timeline shows: one phase of one operation, or a plan that begins. Times are those of now_ns().
struct TraceEvent {
  std::string name;
  const char* phase;
  uint64_t begin_ns;
  uint64_t end_ns;
  uint64_t bytes;
};

/// Events since the last drain; nothing while off. Keeps at most a million and counts the rest.
class Trace {
 public:
  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool marks_plans() const { return marks_plans_.load(std::memory_order_relaxed); }

  /// Forgets what came before, and takes events from now on: what has begun earlier begins now.
  void start(bool marks_plans) {
    const std::lock_guard lock(mu_);
    events_.clear();
    dropped_ = 0;
    since_ns_ = now_ns();
    marks_plans_.store(marks_plans, std::memory_order_relaxed);
    on_.store(true, std::memory_order_relaxed);
  }

  /// Takes no more; what was taken can still be drained.
  void stop() {
    const std::lock_guard lock(mu_);
    on_.store(false, std::memory_order_relaxed);
    marks_plans_.store(false, std::memory_order_relaxed);
  }

  void add(TraceEvent event) {
    const std::lock_guard lock(mu_);
    // Whoever adds may have looked at on() before a stop and a start.
    if (!on() || event.end_ns < since_ns_) return;
    event.begin_ns = std::max(event.begin_ns, since_ns_);
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
  std::atomic<bool> on_{false};
  std::atomic<bool> marks_plans_{false};
  std::mutex mu_;
  std::vector<TraceEvent> events_;
  uint64_t dropped_ = 0;
  uint64_t since_ns_ = 0;
};

}  // namespace farandole
