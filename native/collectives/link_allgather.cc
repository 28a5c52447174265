#include <cstring>
#include <vector>

#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"

namespace farandole {

void link_allgather(Mesh& mesh, std::span<const std::byte> mine, std::span<std::byte* const> out,
                    std::span<const size_t> bytes) {
  std::vector<Outgoing> sends;
  std::vector<Incoming> receives;
  for (int distance = 1; distance < mesh.size(); ++distance) {
    const int peer = (mesh.rank() + distance) % mesh.size();
    sends.push_back({&mesh.link(peer), mine.data(), mine.size()});
    receives.push_back({&mesh.link(peer), out[static_cast<size_t>(peer)], bytes[static_cast<size_t>(peer)]});
  }
  exchange(mesh, sends, receives);
  std::byte* own = out[static_cast<size_t>(mesh.rank())];
  if (!mine.empty() && own != mine.data()) std::memcpy(own, mine.data(), mine.size());
}

}  // namespace farandole
