#pragma once

#include <cstdint>

namespace farandole {

/// Ends a wait early: on another rank's abort, a lost peer or a deadline.
class Guard {
 public:
  virtual ~Guard() = default;

  /// Throws `Error` when the wait cannot succeed. Called every few microseconds during a wait, so it must be cheap.
  virtual void check() = 0;

  /// Returns whether another thread computes on the core that the wait would occupy. The wait then spins only briefly.
  [[nodiscard]] virtual bool spins_briefly() const { return false; }
};

}  // namespace farandole
