#include "engine/lane.h"

#include "base/clock.h"

namespace farandole {
namespace {

constexpr std::chrono::microseconds kNap{500};
constexpr std::chrono::milliseconds kLongest{2};
constexpr std::chrono::microseconds kMoment{1};
// Where ranks share cores: an awaited one mostly arrives within so much time if it gets this core, and to sleep and to
// be woken takes about as long.
constexpr std::chrono::microseconds kYielding{100};
constexpr uint64_t kYieldEvery = 8;  // spins
constexpr uint64_t kLookEvery = 64;  // spins

uint64_t ns(std::chrono::nanoseconds span) { return static_cast<uint64_t>(span.count()); }

}  // namespace

std::byte* Lane::slot(uint32_t round, int rank, size_t bytes) {
  std::byte* beside = segment_.lane().beside(round, static_cast<uint32_t>(rank), size_, bytes);
  return beside != nullptr ? beside : segment_.lane_slot(rank, round);
}

bool Lane::agree(const LaneAttempt& attempt) {
  if (attempt.number >= LaneRounds::kMostNumbers || size_ > LaneRounds::kMostRanks) return false;
  LaneRounds& rounds = segment_.lane();
  if (rounds.suspended()) return false;
  for (;; ++round_) {
    if (attempt.payload > 0) attempt.load(slot(round_, rank_, attempt.payload));
    const LaneRounds::Arrival arrival = rounds.arrive(round_, attempt.number, attempt.instance);
    if (arrival == LaneRounds::Arrival::Waiting) break;
    if (arrival == LaneRounds::Arrival::Missed) continue;
    wake_others();
    ++round_;
    return false;
  }
  if (open()) wait(attempt);
  else wake_others();
  // Spoiling and the last arrival exclude each other: only one of them changes the word first.
  const LaneRounds::State state = rounds.spoil(round_, size_);
  ++round_;
  return state == LaneRounds::State::Agreed;
}

void Lane::wait(const LaneAttempt& attempt) {
  const uint64_t begin = wait_from_begin(attempt);
  if (begin != 0) waited_ns_.fetch_add(now_ns() - begin, std::memory_order_relaxed);
}

/// Returns the start of the wait; 0 if it was shorter than a clock check.
uint64_t Lane::wait_from_begin(const LaneAttempt& attempt) {
  Signal& doorbell = segment_.area(rank_).doorbell;
  uint64_t begin = 0;
  bool called = false;
  const uint64_t awake = ns(policy_.shares_cores() ? kYielding : policy_.spin);
  for (uint64_t spins = 1; open(); ++spins) {
    const bool rests = policy_.shares_cores() && spins % kYieldEvery == 0 && !yield_core();
    relax();
    if (!rests && spins % kLookEvery != 0) continue;
    const uint64_t now = now_ns();
    if (begin == 0) begin = now;
    if (attempt.interrupted() || has_asking_rank(attempt.instance) || now - begin > ns(kLongest)) return begin;
    if (!called && now - begin > ns(kMoment)) {
      called = true;
      attempt.before_wait();
    }
    if (!rests && stay_awake(now - begin, awake)) continue;
    const uint32_t seen = doorbell.load();
    doorbell.sleep_unless(seen, kNap, [this] { return !open(); });
    spins = kLookEvery - 1;
  }
  return begin;
}

void Lane::wake_others() {
  for (int rank = 0; rank < static_cast<int>(size_); ++rank)
    if (rank != rank_) segment_.area(rank).doorbell.wake_sleepers();
}

/// Returns whether a rank that has run `instance` operations waits for the coordinator, so that it will not arrive.
bool Lane::has_asking_rank(uint32_t instance) const {
  for (int rank = 0; rank < static_cast<int>(size_); ++rank)
    if (rank != rank_ && segment_.area(rank).asked.load(std::memory_order_acquire) == instance + 1) return true;
  return false;
}

void Lane::leave(uint32_t instance) {
  keep_asking(instance);
  // Other ranks wait in the first round that is not spoiled.
  while (segment_.lane().state(round_, size_) == LaneRounds::State::Spoiled) ++round_;
  if (!segment_.lane().occupied(round_)) return;
  segment_.lane().spoil(round_, size_);
  ++round_;
  wake_others();
}

}  // namespace farandole
