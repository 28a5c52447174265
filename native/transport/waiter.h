#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <span>

#include "transport/futex.h"
#include "transport/guard.h"
#include "transport/link.h"

namespace farandole {

/// Hints to the processor that this is a spin loop.
void relax();

/// How long a waiting thread spins before it sleeps. A spinning thread takes a core from computing ones, so the spin is
/// short when there are more ranks than cores.
struct WaitPolicy {
  std::chrono::nanoseconds spin{100'000};
};

/// One wait since the last progress: spins, then sleeps in short naps, and checks the guard throughout.
class Waiter {
 public:
  Waiter(Guard& guard, WaitPolicy policy) : guard_(guard), policy_(policy) {}

  /// Reports progress; the wait spins again.
  void moved() { pauses_ = 0; }

  /// Waits briefly after no progress. Throws what the guard throws.
  void pause() { pause(nullptr, nullptr); }

  /// The same, but wakes when `reading` has bytes or `writing` has room. Naps for 50 us instead if one of them is null
  /// or has no descriptor.
  void pause(const Link* reading, const Link* writing);

  /// The same for many links: `fds` as for poll(). A negative fd stands for a link through memory, which cannot wake a
  /// sleeper, so this thread then naps for 50 us.
  void pause(std::span<pollfd> fds);

  /// Waits until `signal` has reached `target`.
  void until(Signal& signal, uint32_t target) {
    if (!signal.reached(target)) [[unlikely]]
      wait_for(signal, target);
  }

  [[nodiscard]] Guard& guard() { return guard_; }

 private:
  [[nodiscard]] bool spin_on();
  void wait_for(Signal& signal, uint32_t target);

  Guard& guard_;
  WaitPolicy policy_;
  uint64_t pauses_ = 0;
  uint64_t since_ns_ = 0;
};

}  // namespace farandole
