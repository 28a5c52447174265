#pragma once

#include <cstdint>

namespace farandole {

/// Ends a wait early: on another rank's abort, a lost peer or a deadline.
class Guard {
 public:
  virtual ~Guard() = default;

  /// Throws `Error` when the wait cannot succeed. Called every few microseconds during a wait, so it must be cheap.
  virtual void check() = 0;

  /// Returns whether `rank` has left in order, after its part of all operations; false where that is not known.
  [[nodiscard]] virtual bool has_left(int /*rank*/) const { return false; }

  /// Returns whether another thread computes on the core that the wait would occupy. The wait then spins only briefly.
  [[nodiscard]] virtual bool spins_briefly() const { return false; }
};

}  // namespace farandole
