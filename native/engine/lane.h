#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "transport/lane.h"
#include "transport/segment.h"

namespace farandole {

/// One operation's way through the lane.
struct Passage {
  uint32_t number = 0;    // what the ranks agree on
  uint32_t instance = 0;  // how many operations all have run before it
  /// What each rank brings along, up to kSmallBytes, and what puts it there. Whoever knows that all have arrived can
  /// read all of it.
  size_t payload = 0;
  std::function<void(std::byte*)> load;
  /// True when something else has come up, so that waiting on would only delay it.
  std::function<bool()> called_away;
  /// Called once, when the wait turns out to be longer than a moment.
  std::function<void()> settle;
};

/// This rank's walk through the rounds in which the ranks of a host agree without the coordinator.
class Lane {
 public:
  Lane(Segment& segment, int rank, std::chrono::nanoseconds spin)
      : segment_(segment), rank_(rank), size_(static_cast<uint32_t>(segment.ranks())), spin_(spin) {}

  /// Waits for all ranks to arrive for the operation: spins, then naps for two milliseconds at most. True when they
  /// have: all of them run it next, and nothing else. False when this rank has to ask the coordinator, because others
  /// do, time is up, or it was called away.
  [[nodiscard]] bool agree(const Passage& passage);

  /// What `rank` has brought along into the round just agreed on.
  ///
  /// It stays as it is until this rank arrives in the next round or asks the coordinator: nobody can write to it again
  /// before the lane has come round, and no operation but a few failing ones can be over without this rank.
  [[nodiscard]] const std::byte* payload(int rank, size_t bytes) { return slot(round_ - 1, rank, bytes); }

  /// How long agree() has waited so far, in all; moments are not counted.
  [[nodiscard]] uint64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

  /// This rank is about to ask the coordinator: whoever waits for it in the lane need not wait any longer.
  void pass();

 private:
  [[nodiscard]] bool open() { return segment_.lane().state(round_, size_) == LaneRounds::State::Open; }
  [[nodiscard]] std::byte* slot(uint32_t round, int rank, size_t bytes);
  void wait(const Passage& passage);
  [[nodiscard]] uint64_t wait_from_begin(const Passage& passage);
  void tell_others();

  Segment& segment_;
  int rank_;
  uint32_t size_;
  std::chrono::nanoseconds spin_;
  uint32_t round_ = 0;
  std::atomic<uint64_t> waited_ns_{0};
};

}  // namespace farandole
