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

/// Gives the core to an awaited rank that may need it. Returns false, and does nothing, within a second of a yield that
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
