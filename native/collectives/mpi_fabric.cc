#include "collectives/mpi_fabric.h"

#include "collectives/mesh_world.h"
#include "collectives/mpi_collectives.h"

namespace farandole {
namespace {

struct MpiCalls {
  static constexpr const char* name = "mpi";
  static constexpr auto allreduce = mpi_allreduce;
  static constexpr auto allgather = mpi_allgather;
  static constexpr auto broadcast = mpi_broadcast;
  static constexpr auto reducescatter = mpi_reducescatter;
  static constexpr auto barrier = mpi_barrier;

  static void turn(MpiMesh& /*mesh*/, const Knobs& /*knobs*/) {}
  static void alltoall(MpiMesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) {
    const OwnShares own(shares, mesh.rank(), mesh.size());
    mpi_alltoall(mesh, in, own.send, out, own.receive);
  }
};

class MpiWorld final : public MeshWorld<MpiMesh, MpiCalls> {
 public:
  using MeshWorld::MeshWorld;

  [[nodiscard]] bool has_abandoned() const override { return MpiComm::has_abandoned(); }
  [[nodiscard]] bool broadcasts_together() const override { return false; }
  [[nodiscard]] bool notices_deaths() const override { return false; }
};

}  // namespace

std::unique_ptr<World> MpiFabric::make_world(Guard& guard, WaitPolicy policy, bool direct) const {
  return std::make_unique<MpiWorld>(MpiMesh(comm_, guard, policy, direct));
}

}  // namespace farandole
