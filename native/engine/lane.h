#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "transport/lane.h"
#include "transport/segment.h"

namespace farandole {

/// This rank's walk through the rounds in which the ranks of a host agree without the coordinator.
class Lane {
 public:
  Lane(Segment& segment, int rank, std::chrono::nanoseconds spin)
      : segment_(segment), rank_(rank), size_(static_cast<uint32_t>(segment.ranks())), spin_(spin) {}

  /// Waits for all ranks to arrive for operation `number`, before which all have run `instance` others: spins, then
  /// naps for two milliseconds at most. True when they have: all of them run it next, and nothing else. False when this
  /// rank has to ask the coordinator, because others do, time is up, or `called_away` said so.
  [[nodiscard]] bool agree(uint32_t number, uint32_t instance, const std::function<bool()>& called_away);

  /// This rank is about to ask the coordinator: whoever waits for it in the lane need not wait any longer.
  void pass();

 private:
  [[nodiscard]] bool open() { return segment_.lane().state(round_, size_) == LaneRounds::State::Open; }
  void wait(const std::function<bool()>& called_away);
  void tell_others();

  Segment& segment_;
  int rank_;
  uint32_t size_;
  std::chrono::nanoseconds spin_;
  uint32_t round_ = 0;
};

}  // namespace farandole
