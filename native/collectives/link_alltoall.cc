#include <cstring>
#include <vector>

#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"

namespace farandole {

void link_alltoall(Mesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send_bytes,
                   std::span<std::byte* const> out, std::span<const size_t> recv_bytes) {
  std::vector<Outgoing> sends;
  std::vector<Incoming> receives;
  for (int distance = 1; distance < mesh.size(); ++distance) {
    const int to = (mesh.rank() + distance) % mesh.size();
    const int from = (mesh.rank() + mesh.size() - distance) % mesh.size();
    sends.push_back({&mesh.link(to), in[static_cast<size_t>(to)], send_bytes[static_cast<size_t>(to)]});
    receives.push_back({&mesh.link(from), out[static_cast<size_t>(from)], recv_bytes[static_cast<size_t>(from)]});
  }
  exchange(mesh, sends, receives);
  const auto me = static_cast<size_t>(mesh.rank());
  if (send_bytes[me] != 0 && in[me] != out[me]) std::memcpy(out[me], in[me], send_bytes[me]);
}

}  // namespace farandole
