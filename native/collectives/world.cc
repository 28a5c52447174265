#include "collectives/world.h"

#include <utility>

#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/mesh_world.h"
#include "collectives/shm_collectives.h"

namespace farandole {
namespace {

using SharedWorld = MeshWorld<SharedMesh, SharedCalls>;
using LinkWorld = MeshWorld<Mesh, LinkCalls>;
using GridWorld = MeshWorld<GridMesh, GridCalls>;

}  // namespace

std::unique_ptr<World> make_world(SharedMesh shared) { return std::make_unique<SharedWorld>(std::move(shared)); }

std::unique_ptr<World> make_world(Mesh links) { return std::make_unique<LinkWorld>(std::move(links)); }

std::unique_ptr<World> make_world(GridMesh grid, std::unique_ptr<Mesh> flat) {
  if (flat == nullptr) return std::make_unique<GridWorld>(std::move(grid));
  return std::make_unique<EitherWorld>(make_world(std::move(grid)), make_world(std::move(*flat)));
}

}  // namespace farandole
