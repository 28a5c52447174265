#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <span>

#include "transport/futex.h"
#include "transport/guard.h"

namespace farandole {

/// Hints to the processor that this is a spin loop.
void relax();

/// How long a thread does not yield its core after a yield that gave the core to another thread for a time slice: a
/// thread that sleeps instead gets the core back as soon as it is woken.
///
/// A process that computes takes a slice at each yield; then the rests grow to a second. Ranks that wait for each other
/// do so now and then; then a rest is short.
class YieldRest {
 public:
  // All in ns. A rest is twice as long as the one before if it follows within kSoon times the length of that one.
  static constexpr uint64_t kSlice = 500'000;
  static constexpr uint64_t kLeast = 10'000'000;
  static constexpr uint64_t kMost = 1'000'000'000;
  static constexpr uint64_t kSoon = 4;

  /// Notes a yield from `begin` to `end`; returns whether a rest follows.
  bool note(uint64_t begin, uint64_t end);
  [[nodiscard]] uint64_t until() const { return until_; }

 private:
  uint64_t length_ = 0;
  uint64_t until_ = 0;
};

/// Gives the core to an awaited rank that may need it. Returns false, and does nothing, in a rest after a yield that
/// took a slice.
bool yield_core();

/// Returns whether a thread that has waited for `waited` should go on without sleep, which it may for `most` (both in
/// ns). At first it only spins. Then it yields at each call, because the awaited rank may be on this core: the kernel
/// puts two ranks there when other processes compute.
[[nodiscard]] bool stay_awake(uint64_t waited, uint64_t most);

/// How long a waiting thread spins before it sleeps. A spinning thread takes a core from computing ones, so the spin is
/// short when there are more ranks than cores.
struct WaitPolicy {
  std::chrono::nanoseconds spin{100'000};

  /// Returns whether the awaited rank may need this core, as there are more ranks than cores.
  [[nodiscard]] bool shares_cores() const { return spin < std::chrono::microseconds(10); }
};

/// One wait since the last progress: spins, then sleeps in short naps, and checks the guard throughout.
class Waiter {
 public:
  Waiter(Guard& guard, WaitPolicy policy) : guard_(guard), policy_(policy) {}

  /// Reports progress; the wait spins again.
  void moved() { pauses_ = 0; }

  /// Waits briefly after no progress. Throws what the guard throws.
  void pause() { pause({}); }

  /// The same, but wakes when one of `fds` is ready, as for poll(). Without any this thread naps for 50 us.
  void pause(std::span<pollfd> fds);

  /// Waits until `signal` has reached `target`.
  void until(Signal& signal, uint32_t target) {
    if (!signal.reached(target)) [[unlikely]]
      wait_for(signal, target);
  }

 private:
  [[nodiscard]] bool spin_on(uint64_t pauses);
  void wait_for(Signal& signal, uint32_t target);

  Guard& guard_;
  WaitPolicy policy_;
  uint64_t pauses_ = 0;
  uint64_t since_ns_ = 0;
};

}  // namespace farandole
