#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/grid.h"
#include "collectives/knobs.h"
#include "collectives/piece.h"
#include "transport/mesh.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// The bytes that one rank sends to another; the same function on all ranks.
using Shares = std::function<size_t(int from, int to)>;

/// The shares of this rank.
struct OwnShares {
  std::vector<size_t> send, receive;

  OwnShares(const Shares& shares, int rank, int size) {
    for (int peer = 0; peer < size; ++peer) {
      send.push_back(shares(rank, peer));
      receive.push_back(shares(peer, rank));
    }
  }
};

/// The collectives over all ranks of an engine, on one kind of transport.
///
/// | make_world() of | ranks                                | algorithms                                             |
/// |-----------------|--------------------------------------|--------------------------------------------------------|
/// | `SharedMesh`    | one host, more than one rank         | shm_*: slots of the shared segment                     |
/// | `GridMesh`      | hosts with equally many ranks, L > 1 | grid_*: shm_* in the host, link_* over one link a host |
/// | `Mesh`          | any other hosts, or a single rank    | link_*: one link per peer                              |
///
/// A `Fabric` makes a world of its own: `MpiFabric` one for any hosts, whose algorithms (mpi_*) are nonblocking calls
/// of the site's MPI.
///
/// The algorithm depends on the knobs and the number of bytes, which are the same on all ranks:
///
/// | allreduce, N ranks of L a host | few bytes (a constant, or a knob)      | more                                |
/// |--------------------------------|----------------------------------------|-------------------------------------|
/// | shm                            | all inputs at once                     | pipeline of reduced segments        |
/// | link                           | all inputs at once, or doubling (N > 8)| segments, chunk by chunk            |
/// | grid                           | shm, then link over the column         | shards: shm, link and shm pipelined |
///
/// Each operation blocks until all ranks take part, and returns the name of the algorithm that ran, a literal, for the
/// timeline.
class World {
 public:
  World() = default;
  virtual ~World() = default;
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  /// Changes the knobs. All ranks must call it between the same two operations.
  virtual void turn(const Knobs& knobs) = 0;

  virtual const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) = 0;
  virtual const char* allgather(const std::byte* mine, std::span<std::byte* const> out,
                                std::span<const size_t> bytes) = 0;
  virtual const char* broadcast(std::span<const Piece> pieces, int root) = 0;
  virtual const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                               const Shares& shares) = 0;
  virtual const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                                    const Reduction& reduction) = 0;
  /// Sums float32 tensors by blocks of 8-bit integers, times `factor`. Returns null, on all ranks, if this world has no
  /// algorithm of its own for it; int8_allreduce() then composes one of the collectives above.
  virtual const char* int8_allreduce(std::span<const Piece> /*pieces*/, float /*factor*/) { return nullptr; }

  /// Returns whether the transport may still write to the memory of an operation that has failed.
  [[nodiscard]] virtual bool has_abandoned() const { return false; }
  /// Returns whether no rank leaves a broadcast before all ranks have begun it.
  [[nodiscard]] virtual bool broadcasts_together() const { return true; }
  /// Returns whether a wait for a dead rank of this host ends by itself. Otherwise the guard must look for dead ranks.
  [[nodiscard]] virtual bool notices_deaths() const { return true; }
};

[[nodiscard]] std::unique_ptr<World> make_world(SharedMesh shared);
[[nodiscard]] std::unique_ptr<World> make_world(Mesh links);
/// With `flat`, links to all ranks, the knob `hierarchical` selects two levels or one.
[[nodiscard]] std::unique_ptr<World> make_world(GridMesh grid, std::unique_ptr<Mesh> flat = nullptr);

}  // namespace farandole
