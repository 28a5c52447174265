#pragma once

#include <memory>

#include "collectives/world.h"
#include "transport/guard.h"
#include "transport/waiter.h"

namespace farandole {

/// A library that carries the tensors of an engine, in place of data sockets and the slots of the segment.
///
/// Python chooses it (src/farandole/core/wiring/fabric.py) and makes it (bind/fabrics.cc). Requests and plans still use
/// the control connections, and the segment still shows which ranks live.
class Fabric {
 public:
  Fabric() = default;
  virtual ~Fabric() = default;
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  /// The engine's rank and number of ranks, as the library knows them.
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// Returns a world over the library. Its waits call `guard.check()`, which must outlive it. `direct`: an exchange
  /// between all ranks moves no more bytes between hosts than any other algorithm.
  [[nodiscard]] virtual std::unique_ptr<World> make_world(Guard& guard, WaitPolicy policy, bool direct) const = 0;
};

}  // namespace farandole
