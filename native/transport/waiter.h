#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <span>

#include "transport/futex.h"
#include "transport/guard.h"
#include "transport/link.h"

namespace farandole {

/// Tells the processor that this is a spin loop.
void relax();

/// How a thread waits: how long it spins before it sleeps. A spinning thread next to computing ones costs them their
/// core, so the spin is short when there are more ranks than cores.
struct Patience {
  std::chrono::nanoseconds spin{100'000};
};

/// One wait, from the last progress on: spins, then sleeps in short naps, asking the guard all along.
class Waiter {
 public:
  Waiter(Guard& guard, Patience patience) : guard_(guard), patience_(patience) {}

  /// Progress was made: back to spinning.
  void moved() { pauses_ = 0; }

  /// Nothing moved: waits a little. Throws what the guard throws.
  void pause() { pause(nullptr, nullptr); }

  /// The same, waking when `reading` has bytes or `writing` has room (either may be null).
  void pause(const Link* reading, const Link* writing);

  /// The same for many links: `fds` as for poll(). A negative fd stands for a link through memory, which cannot wake a
  /// sleeper: the naps are short then.
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
  Patience patience_;
  uint64_t pauses_ = 0;
  uint64_t since_ns_ = 0;
};

}  // namespace farandole
