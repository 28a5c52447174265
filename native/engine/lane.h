#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "transport/lane.h"
#include "transport/segment.h"
#include "transport/waiter.h"

namespace farandole {

/// One attempt to agree on an operation in the lane.
struct LaneAttempt {
  uint32_t number = 0;    // the response cache's number of the request
  uint32_t instance = 0;  // operations that all ranks have run before it
  /// Bytes that each rank contributes, up to kSmallBytes, and the function that writes them. After the agreement every
  /// rank can read those of all ranks.
  size_t payload = 0;
  std::function<void(std::byte*)> load;
  /// Returns whether the wait should end because new requests were submitted.
  std::function<bool()> interrupted;
  /// Called at most once, before a wait longer than about a microsecond.
  std::function<void()> before_wait;
};

/// This rank's position in the rounds of the host's lane.
class Lane {
 public:
  Lane(Segment& segment, int rank, WaitPolicy policy)
      : segment_(segment), rank_(rank), size_(static_cast<uint32_t>(segment.ranks())), policy_(policy) {}

  /// Waits for all ranks to arrive for the operation: spins, or yields its core where ranks share cores, then naps, for
  /// at most two milliseconds. Returns true if they have: all of them run it next, and nothing else. Returns false if
  /// this rank must ask the coordinator, because others do, the time is up, or it was interrupted.
  [[nodiscard]] bool agree(const LaneAttempt& attempt);

  /// The payload of `rank` in the round just agreed.
  ///
  /// It is valid until this rank arrives in the next round or asks the coordinator. A slot is written again only after
  /// kRounds rounds, and only a few failing operations can complete without this rank.
  [[nodiscard]] const std::byte* payload(int rank, size_t bytes) { return slot(round_ - 1, rank, bytes); }

  /// Total time of waits in agree() that were longer than about a microsecond.
  [[nodiscard]] uint64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

  /// Releases the ranks that wait in the lane, before this rank asks the coordinator. A rank that arrives later, after
  /// the same number of operations (`instance`), does not wait.
  void leave(uint32_t instance);

  /// Keeps ranks that arrive after `instance` operations from waiting, because this rank still asks the coordinator.
  void keep_asking(uint32_t instance) { asked().store(instance + 1, std::memory_order_release); }

 private:
  [[nodiscard]] bool open() { return segment_.lane().state(round_, size_) == LaneRounds::State::Open; }
  [[nodiscard]] std::byte* slot(uint32_t round, int rank, size_t bytes);
  void wait(const LaneAttempt& attempt);
  [[nodiscard]] uint64_t wait_from_begin(const LaneAttempt& attempt);
  void wake_others();
  [[nodiscard]] std::atomic<uint32_t>& asked() { return segment_.area(rank_).asked; }
  [[nodiscard]] bool has_asking_rank(uint32_t instance) const;

  Segment& segment_;
  int rank_;
  uint32_t size_;
  WaitPolicy policy_;
  uint32_t round_ = 0;
  std::atomic<uint64_t> waited_ns_{0};
};

}  // namespace farandole
