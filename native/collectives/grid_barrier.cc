#include "collectives/grid_barrier.h"

#include "collectives/link_barrier.h"
#include "collectives/shm_exchange.h"

namespace farandole {

void grid_barrier(GridMesh& mesh) {
  shm_barrier(mesh.shared());
  link_barrier(mesh.column());
}

}  // namespace farandole
