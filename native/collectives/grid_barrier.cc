#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/shm_collectives.h"

namespace farandole {

void grid_barrier(GridMesh& mesh) {
  shm_barrier(mesh.shared());
  link_barrier(mesh.column());
}

}  // namespace farandole
