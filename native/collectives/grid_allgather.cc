#include <vector>

#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/shm_collectives.h"

namespace farandole {

void grid_allgather(GridMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                    std::span<const size_t> bytes) {
  const Grid& grid = mesh.grid();
  std::vector<std::byte*> to(mesh.hosts());
  std::vector<size_t> sizes(mesh.hosts());
  for (size_t host = 0; host < mesh.hosts(); ++host) {
    const auto rank = static_cast<size_t>(grid.rank_at(static_cast<int>(host), grid.local));
    to[host] = out[rank];
    sizes[host] = bytes[rank];
  }
  const std::vector<std::byte*> column = to;
  link_allgather(mesh.column(), {mine, sizes[static_cast<size_t>(grid.host)]}, to, sizes);

  to.resize(mesh.locals());
  sizes.resize(mesh.locals());
  for (size_t host = 0; host < mesh.hosts(); ++host) {
    for (size_t local = 0; local < mesh.locals(); ++local) {
      const auto rank = static_cast<size_t>(grid.rank_at(static_cast<int>(host), static_cast<int>(local)));
      to[local] = out[rank];
      sizes[local] = bytes[rank];
    }
    shm_allgather(mesh.shared(), column[host], to, sizes);
  }
}

}  // namespace farandole
