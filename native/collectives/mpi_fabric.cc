#include "collectives/mpi_fabric.h"

#include "collectives/mesh_world.h"
#include "collectives/mpi_collectives.h"

namespace farandole {
namespace {

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
