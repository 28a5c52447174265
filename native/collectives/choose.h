#pragma once

#include <memory>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/grid.h"
#include "collectives/grid_alltoall.h"
#include "collectives/knobs.h"
#include "collectives/piece.h"
#include "transport/mesh.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// All ranks as the collectives see them, and the one place that decides which algorithm runs.
///
/// | world                          | algorithms                                                                 |
/// |--------------------------------|----------------------------------------------------------------------------|
/// | one host                       | shm_*: through the slots of the shared segment                             |
/// | hosts of equally many ranks,   | grid_*: shm_* in the host, link_* over one link per other host             |
/// | more than one each             |                                                                            |
/// | any other several hosts        | link_*: over one link per peer, memory or TCP                              |
///
/// The knobs are the same on all ranks, and so is the number of bytes that decides within each:
///
/// | allreduce, N ranks of L a host | few bytes (a constant, or a knob)      | more                                |
/// |--------------------------------|----------------------------------------|-------------------------------------|
/// | shm                            | all inputs at once                     | pipeline of reduced segments        |
/// | link                           | all inputs at once, or doubling (N > 8)| segments, chunk by chunk            |
/// | grid                           | shm, then link over the column         | shards: shm, link and shm pipelined |
///
/// Each operation returns what people call the algorithm that ran: a literal, for the timeline.
class World {
 public:
  explicit World(std::unique_ptr<SharedMesh> shared) : shared_(std::move(shared)) {}
  explicit World(std::unique_ptr<Mesh> links) : links_(std::move(links)) {}
  /// With `flat`, links to everybody, the world can be told to work in one level too.
  explicit World(std::unique_ptr<GridMesh> grid, std::unique_ptr<Mesh> flat = nullptr)
      : links_(std::move(flat)), grid_(std::move(grid)) {}

  /// To be called on all ranks between the same two operations.
  void turn(const Knobs& knobs);

  const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction);
  const char* allgather(const std::byte* mine, std::span<std::byte* const> out, std::span<const size_t> bytes);
  const char* broadcast(std::span<const Piece> pieces, int root);
  const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out, const Shares& shares);
  const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                            const Reduction& reduction);
  const char* barrier();

 private:
  [[nodiscard]] const char* family() const;
  [[nodiscard]] bool in_two_levels() const { return grid_ && (hierarchical_ || !links_); }

  std::unique_ptr<SharedMesh> shared_;
  std::unique_ptr<Mesh> links_;
  std::unique_ptr<GridMesh> grid_;
  bool hierarchical_ = true;
};

}  // namespace farandole
