#include "collectives/world.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/mpi_collectives.h"
#include "collectives/shm_collectives.h"

namespace farandole {
namespace {

/// The shares of this rank, and the largest share of all ranks.
struct OwnShares {
  std::vector<size_t> send, receive;
  size_t longest = 0;

  OwnShares(const Shares& shares, int rank, int size) {
    for (int peer = 0; peer < size; ++peer) {
      send.push_back(shares(rank, peer));
      receive.push_back(shares(peer, rank));
      for (int to = 0; to < size; ++to) longest = std::max(longest, shares(peer, to));
    }
  }
};

class SharedWorld final : public World {
 public:
  explicit SharedWorld(SharedMesh mesh) : mesh_(std::move(mesh)) {}

  void turn(const Knobs& knobs) override { mesh_.use_of_slots(knobs.slot_bytes); }

  const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) override {
    return shm_allreduce(mesh_, pieces, dtype, reduction);
  }
  const char* allgather(const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) override {
    shm_allgather(mesh_, mine, out, bytes);
    return kName;
  }
  const char* broadcast(std::span<const Piece> pieces, int root) override {
    shm_broadcast(mesh_, pieces, root);
    return kName;
  }
  const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) override {
    const OwnShares own(shares, mesh_.rank(), mesh_.size());
    shm_alltoall(mesh_, in, own.send, out, own.receive, own.longest);
    return kName;
  }
  const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                            const Reduction& reduction) override {
    shm_reducescatter(mesh_, in, out, counts, dtype, reduction);
    return kName;
  }
  const char* barrier() override {
    shm_barrier(mesh_);
    return kName;
  }

 private:
  static constexpr const char* kName = "shm slots";
  SharedMesh mesh_;
};

class LinkWorld final : public World {
 public:
  explicit LinkWorld(Mesh mesh) : mesh_(std::move(mesh)) {}

  void turn(const Knobs& knobs) override { mesh_.use_sizes(knobs.link_chunk, knobs.link_small); }

  const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) override {
    return link_allreduce(mesh_, pieces, dtype, reduction);
  }
  const char* allgather(const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) override {
    link_allgather(mesh_, {mine, bytes[static_cast<size_t>(mesh_.rank())]}, out, bytes);
    return kName;
  }
  const char* broadcast(std::span<const Piece> pieces, int root) override {
    link_broadcast(mesh_, pieces, root);
    return kName;
  }
  const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) override {
    const OwnShares own(shares, mesh_.rank(), mesh_.size());
    link_alltoall(mesh_, in, own.send, out, own.receive);
    return kName;
  }
  const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                            const Reduction& reduction) override {
    link_reducescatter(mesh_, in, out, counts, dtype, reduction);
    return kName;
  }
  const char* barrier() override {
    link_barrier(mesh_);
    return kName;
  }

 private:
  static constexpr const char* kName = "links";
  Mesh mesh_;
};

class GridWorld final : public World {
 public:
  explicit GridWorld(GridMesh mesh) : mesh_(std::move(mesh)) {}

  void turn(const Knobs& knobs) override {
    mesh_.shared().use_of_slots(knobs.slot_bytes);
    mesh_.column().use_sizes(knobs.link_chunk, knobs.link_small);
  }

  const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) override {
    return grid_allreduce(mesh_, pieces, dtype, reduction);
  }
  const char* allgather(const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) override {
    grid_allgather(mesh_, mine, out, bytes);
    return kName;
  }
  const char* broadcast(std::span<const Piece> pieces, int root) override {
    grid_broadcast(mesh_, pieces, root);
    return kName;
  }
  const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) override {
    grid_alltoall(mesh_, in, out, shares);
    return kName;
  }
  const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                            const Reduction& reduction) override {
    grid_reducescatter(mesh_, in, out, counts, dtype, reduction);
    return kName;
  }
  const char* barrier() override {
    grid_barrier(mesh_);
    return kName;
  }

 private:
  static constexpr const char* kName = "grid";
  GridMesh mesh_;
};

class MpiWorld final : public World {
 public:
  explicit MpiWorld(MpiMesh mesh) : mesh_(std::move(mesh)) {}

  void turn(const Knobs& /*knobs*/) override {}

  const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) override {
    return mpi_allreduce(mesh_, pieces, dtype, reduction);
  }
  const char* allgather(const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) override {
    mpi_allgather(mesh_, mine, out, bytes);
    return kName;
  }
  const char* broadcast(std::span<const Piece> pieces, int root) override {
    mpi_broadcast(mesh_, pieces, root);
    return kName;
  }
  const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) override {
    const OwnShares own(shares, mesh_.rank(), mesh_.size());
    mpi_alltoall(mesh_, in, own.send, out, own.receive);
    return kName;
  }
  const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                            const Reduction& reduction) override {
    mpi_reducescatter(mesh_, in, out, counts, dtype, reduction);
    return kName;
  }
  const char* barrier() override {
    mpi_barrier(mesh_);
    return kName;
  }
  [[nodiscard]] bool has_abandoned() const override { return MpiComm::has_abandoned(); }

 private:
  static constexpr const char* kName = "mpi";
  MpiMesh mesh_;
};

/// Two worlds of the same ranks; the knob `hierarchical` selects one.
class EitherWorld final : public World {
 public:
  EitherWorld(GridMesh grid, Mesh flat) : grid_(std::move(grid)), flat_(std::move(flat)), chosen_(&grid_) {}

  void turn(const Knobs& knobs) override {
    grid_.turn(knobs);
    flat_.turn(knobs);
    chosen_ = knobs.hierarchical ? static_cast<World*>(&grid_) : &flat_;
  }

  const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) override {
    return chosen_->allreduce(pieces, dtype, reduction);
  }
  const char* allgather(const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) override {
    return chosen_->allgather(mine, out, bytes);
  }
  const char* broadcast(std::span<const Piece> pieces, int root) override { return chosen_->broadcast(pieces, root); }
  const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) override {
    return chosen_->alltoall(in, out, shares);
  }
  const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                            const Reduction& reduction) override {
    return chosen_->reducescatter(in, out, counts, dtype, reduction);
  }
  const char* barrier() override { return chosen_->barrier(); }

 private:
  GridWorld grid_;
  LinkWorld flat_;
  World* chosen_;
};

}  // namespace

std::unique_ptr<World> make_world(SharedMesh shared) { return std::make_unique<SharedWorld>(std::move(shared)); }

std::unique_ptr<World> make_world(Mesh links) { return std::make_unique<LinkWorld>(std::move(links)); }

std::unique_ptr<World> make_world(MpiMesh mpi) { return std::make_unique<MpiWorld>(std::move(mpi)); }

std::unique_ptr<World> make_world(GridMesh grid, std::unique_ptr<Mesh> flat) {
  if (flat == nullptr) return std::make_unique<GridWorld>(std::move(grid));
  return std::make_unique<EitherWorld>(std::move(grid), std::move(*flat));
}

}  // namespace farandole
