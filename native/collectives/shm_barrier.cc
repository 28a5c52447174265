#include "collectives/shm_collectives.h"

namespace farandole {

void shm_barrier(SharedMesh& mesh) {
  const uint32_t number = mesh.begin_small();
  mesh.publish_small(number);
  for (int peer = 0; peer < mesh.size(); ++peer) mesh.await_small(peer, number);
}

}  // namespace farandole
