#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/shm_collectives.h"

namespace farandole {
namespace {

/// The parts of the ranks of one host, next to each other: in place if they are so already.
const std::byte* row_of(const Grid& grid, int host, const std::byte* in, std::span<const size_t> starts,
                        std::span<const size_t> bytes, std::vector<std::byte>& packed) {
  const auto first = static_cast<size_t>(grid.rank_at(host, 0));
  const auto last = static_cast<size_t>(grid.rank_at(host, grid.locals - 1));
  if (last - first + 1 == static_cast<size_t>(grid.locals)) return in + starts[first];
  packed.clear();
  for (int local = 0; local < grid.locals; ++local) {
    const auto rank = static_cast<size_t>(grid.rank_at(host, local));
    packed.insert(packed.end(), in + starts[rank], in + starts[rank] + bytes[rank]);
  }
  return packed.data();
}

void by_way_of_all(GridMesh& mesh, const std::byte* in, std::byte* out, size_t total, size_t start, size_t bytes,
                   DType dtype, const Reduction& reduction) {
  std::vector<std::byte> whole(total);
  const Piece piece{in, whole.data(), total};
  grid_allreduce(mesh, {&piece, 1}, dtype, reduction);
  if (bytes != 0) std::memcpy(out, whole.data() + start, bytes);
}

}  // namespace

void grid_reducescatter(GridMesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts,
                        DType dtype, const Reduction& reduction) {
  const Grid& grid = mesh.grid();
  std::vector<size_t> bytes(counts.size());
  std::vector<size_t> starts(counts.size());
  std::ranges::transform(counts, bytes.begin(), [&](size_t count) { return count * size_of(dtype); });
  std::exclusive_scan(bytes.begin(), bytes.end(), starts.begin(), size_t{0});
  const size_t total = starts.back() + bytes.back();
  if (total == 0) return;
  const auto levels = two_levels(grid, dtype, reduction);
  if (!levels) {
    const auto own = static_cast<size_t>(grid.rank_at(grid.host, grid.local));
    return by_way_of_all(mesh, in, out, total, starts[own], bytes[own], dtype, reduction);
  }

  std::vector<size_t> column(mesh.hosts());  // elements that this rank reduces for each host
  for (int host = 0; host < grid.hosts; ++host)
    column[static_cast<size_t>(host)] = counts[static_cast<size_t>(grid.rank_at(host, grid.local))];
  std::byte* partial = mesh.scratch(std::accumulate(column.begin(), column.end(), size_t{0}) * size_of(dtype));
  std::byte* at = partial;
  std::vector<size_t> row(mesh.locals());
  std::vector<std::byte> packed;
  for (int host = 0; host < grid.hosts; ++host) {
    for (int local = 0; local < grid.locals; ++local)
      row[static_cast<size_t>(local)] = counts[static_cast<size_t>(grid.rank_at(host, local))];
    const std::byte* from = row_of(grid, host, in, starts, bytes, packed);
    shm_reducescatter(mesh.shared(), from, at, row, dtype, levels->within);
    at += column[static_cast<size_t>(host)] * size_of(dtype);
  }
  link_reducescatter(mesh.column(), partial, out, column, dtype, levels->across);
}

}  // namespace farandole
