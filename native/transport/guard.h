#pragma once

#include <cstdint>

namespace farandole {

/// What may end a wait before its condition holds: an abort by another rank, a lost peer, a deadline.
class Guard {
 public:
  virtual ~Guard() = default;

  /// Throws `Error` when waiting on makes no sense. Called every few microseconds while waiting, so it must be cheap.
  virtual void check() = 0;

  /// Is somebody computing on the core that waiting would take? Then the wait spins for a moment only.
  [[nodiscard]] virtual bool is_in_the_way() const { return false; }
};

}  // namespace farandole
