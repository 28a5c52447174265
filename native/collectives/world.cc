#include "collectives/world.h"

#include <algorithm>
#include <utility>

#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/mesh_world.h"
#include "collectives/shm_collectives.h"

namespace farandole {
namespace {

struct SharedCalls {
  static constexpr const char* name = "shm slots";
  static constexpr auto allreduce = shm_allreduce;
  static constexpr auto allgather = shm_allgather;
  static constexpr auto broadcast = shm_broadcast;
  static constexpr auto reducescatter = shm_reducescatter;
  static constexpr auto barrier = shm_barrier;

  static void turn(SharedMesh& mesh, const Knobs& knobs) { mesh.use_of_slots(knobs.slot_bytes); }
  static void alltoall(SharedMesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) {
    const OwnShares own(shares, mesh.rank(), mesh.size());
    size_t longest = 0;  // share of all ranks
    for (int from = 0; from < mesh.size(); ++from)
      for (int to = 0; to < mesh.size(); ++to) longest = std::max(longest, shares(from, to));
    shm_alltoall(mesh, in, own.send, out, own.receive, longest);
  }
};

struct LinkCalls {
  static constexpr const char* name = "links";
  static constexpr auto allreduce = link_allreduce;
  static constexpr auto broadcast = link_broadcast;
  static constexpr auto reducescatter = link_reducescatter;
  static constexpr auto barrier = link_barrier;
  static constexpr auto int8_allreduce = link_int8_allreduce;

  static void turn(Mesh& mesh, const Knobs& knobs) { mesh.use_sizes(knobs.link_chunk, knobs.link_small); }
  static void allgather(Mesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) {
    link_allgather(mesh, {mine, bytes[static_cast<size_t>(mesh.rank())]}, out, bytes);
  }
  static void alltoall(Mesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) {
    const OwnShares own(shares, mesh.rank(), mesh.size());
    link_alltoall(mesh, in, own.send, out, own.receive);
  }
};

struct GridCalls {
  static constexpr const char* name = "grid";
  static constexpr auto allreduce = grid_allreduce;
  static constexpr auto allgather = grid_allgather;
  static constexpr auto broadcast = grid_broadcast;
  static constexpr auto alltoall = grid_alltoall;
  static constexpr auto reducescatter = grid_reducescatter;
  static constexpr auto barrier = grid_barrier;
  static constexpr auto int8_allreduce = grid_int8_allreduce;

  static void turn(GridMesh& mesh, const Knobs& knobs) {
    mesh.shared().use_of_slots(knobs.slot_bytes);
    mesh.column().use_sizes(knobs.link_chunk, knobs.link_small);
  }
};

using SharedWorld = MeshWorld<SharedMesh, SharedCalls>;
using LinkWorld = MeshWorld<Mesh, LinkCalls>;
using GridWorld = MeshWorld<GridMesh, GridCalls>;

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
  const char* int8_allreduce(std::span<const Piece> pieces, float factor) override {
    return chosen_->int8_allreduce(pieces, factor);
  }

 private:
  GridWorld grid_;
  LinkWorld flat_;
  World* chosen_;
};

}  // namespace

std::unique_ptr<World> make_world(SharedMesh shared) { return std::make_unique<SharedWorld>(std::move(shared)); }

std::unique_ptr<World> make_world(Mesh links) { return std::make_unique<LinkWorld>(std::move(links)); }

std::unique_ptr<World> make_world(GridMesh grid, std::unique_ptr<Mesh> flat) {
  if (flat == nullptr) return std::make_unique<GridWorld>(std::move(grid));
  return std::make_unique<EitherWorld>(std::move(grid), std::move(*flat));
}

}  // namespace farandole
