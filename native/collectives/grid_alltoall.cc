#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/shm_collectives.h"

namespace farandole {
namespace {

/// One exchange within the host: the bytes for the ranks of `host` go to the local ranks in their columns. The bytes
/// for this rank's column go to `to`, by local rank.
void gather_for(GridMesh& mesh, int host, std::span<const std::byte* const> in, std::span<std::byte* const> to,
                const Shares& shares) {
  const Grid& grid = mesh.grid();
  std::vector<const std::byte*> from(mesh.locals());
  std::vector<size_t> send(mesh.locals()), receive(mesh.locals());
  size_t longest = 0;
  for (int local = 0; local < grid.locals; ++local) {
    const auto at = static_cast<size_t>(local);
    const int rank = grid.rank_at(host, local);
    from[at] = in[static_cast<size_t>(rank)];
    send[at] = shares(grid.rank_at(grid.host, grid.local), rank);
    receive[at] = shares(grid.rank_at(grid.host, local), grid.rank_at(host, grid.local));
    for (int sender = 0; sender < grid.locals; ++sender)
      longest = std::max(longest, shares(grid.rank_at(grid.host, sender), rank));
  }
  shm_alltoall(mesh.shared(), from, send, to, receive, longest);
}

}  // namespace

void grid_alltoall(GridMesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                   const Shares& shares) {
  const Grid& grid = mesh.grid();
  const int me = grid.rank_at(grid.host, grid.local);
  // Sent to and received from this rank's peer on each host: the concatenated bytes of the ranks of one host.
  std::vector<size_t> send(mesh.hosts()), receive(mesh.hosts());
  size_t staged = 0;
  for (int host = 0; host < grid.hosts; ++host) {
    if (host == grid.host) continue;
    const auto at = static_cast<size_t>(host);
    for (int local = 0; local < grid.locals; ++local) {
      send[at] += shares(grid.rank_at(grid.host, local), grid.rank_at(host, grid.local));
      receive[at] += shares(grid.rank_at(host, local), me);
    }
    staged += send[at] + receive[at];
  }
  std::byte* scratch = mesh.scratch(staged);
  std::vector<const std::byte*> going(mesh.hosts());
  std::vector<std::byte*> coming(mesh.hosts());
  std::vector<std::byte*> to(mesh.locals());
  for (int host = 0; host < grid.hosts; ++host) {
    const auto at = static_cast<size_t>(host);
    going[at] = coming[at] = scratch;
    for (int local = 0; local < grid.locals; ++local) {
      const int sender = grid.rank_at(grid.host, local);
      to[static_cast<size_t>(local)] = host == grid.host ? out[static_cast<size_t>(sender)] : scratch;
      if (host != grid.host) scratch += shares(sender, grid.rank_at(host, grid.local));
    }
    gather_for(mesh, host, in, to, shares);
    if (host != grid.host) coming[at] = scratch;
    scratch += receive[at];
  }
  link_alltoall(mesh.column(), going, send, coming, receive);
  for (int host = 0; host < grid.hosts; ++host) {
    if (host == grid.host) continue;
    const std::byte* from = coming[static_cast<size_t>(host)];
    for (int local = 0; local < grid.locals; ++local) {
      const int sender = grid.rank_at(host, local);
      const size_t bytes = shares(sender, me);
      if (bytes != 0) std::memcpy(out[static_cast<size_t>(sender)], from, bytes);
      from += bytes;
    }
  }
}

}  // namespace farandole
