#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"

namespace farandole {

void link_barrier(Mesh& mesh) {
  // After the step of distance d, a rank knows, directly or through others, that the 2d - 1 ranks before it have
  // arrived.
  for (int distance = 1; distance < mesh.size(); distance *= 2) {
    const int to = (mesh.rank() + distance) % mesh.size();
    const int from = (mesh.rank() + mesh.size() - distance) % mesh.size();
    std::byte token{1};
    std::byte received{};
    Outgoing send{&mesh.link(to), &token, 1};
    Incoming receive{&mesh.link(from), &received, 1};
    exchange(mesh, {&send, 1}, {&receive, 1});
  }
}

}  // namespace farandole
