#pragma once

#include <memory>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "transport/mesh.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// All ranks as the collectives see them, and the one place that decides which algorithm runs.
///
/// | world          | algorithms                                             |
/// |----------------|--------------------------------------------------------|
/// | one host       | shm_*: through the slots of the shared segment         |
/// | several hosts  | link_*: over one link per peer, memory or TCP          |
class World {
 public:
  explicit World(std::unique_ptr<SharedMesh> shared) : shared_(std::move(shared)) {}
  explicit World(std::unique_ptr<Mesh> links) : links_(std::move(links)) {}

  void allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction);
  void allgather(const std::byte* mine, std::span<std::byte* const> out, std::span<const size_t> bytes);
  void broadcast(std::span<const Piece> pieces, int root);
  /// `longest` is the largest share of all: the same on every rank.
  void alltoall(std::span<const std::byte* const> in, std::span<const size_t> send, std::span<std::byte* const> out,
                std::span<const size_t> receive, size_t longest);
  void reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                     const Reduction& reduction);
  void barrier();

 private:
  std::unique_ptr<SharedMesh> shared_;
  std::unique_ptr<Mesh> links_;
};

}  // namespace farandole
