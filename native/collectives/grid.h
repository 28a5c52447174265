#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "base/reduce.h"
#include "transport/mesh.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// Several hosts with equally many ranks, more than one each. A row is a host; a column is the ranks with the same
/// place on their hosts. Hosts are ordered by their first ranks.
struct Grid {
  int hosts;
  int locals;
  int host, local;         // of this rank
  std::vector<int> ranks;  // row by row

  [[nodiscard]] int rank_at(int at_host, int at_local) const {
    return ranks[static_cast<size_t>(at_host * locals + at_local)];
  }
  /// The host of `rank`, and its place there.
  [[nodiscard]] std::pair<int, int> place_of(int rank) const;
};

/// The grid of rank `rank`, where `hosts[r]` is the host of rank r; nothing if the hosts do not form a grid.
[[nodiscard]] std::optional<Grid> grid_of(int rank, const std::vector<int>& hosts);

/// The ranks of other hosts with which `rank` exchanges data: its column, or all of them without a grid. All of them
/// also with `flat`, for a world that may work in one level.
[[nodiscard]] std::vector<int> data_peers(int rank, const std::vector<int>& hosts, bool flat = false);

/// Transports of the two-level algorithms: the memory of the host, and links to this rank's column.
class GridMesh {
 public:
  /// `shared` counts the ranks of this host; `column` has a link per host.
  GridMesh(Grid grid, SharedMesh shared, Mesh column)
      : grid_(std::move(grid)), shared_(std::move(shared)), column_(std::move(column)) {}

  [[nodiscard]] const Grid& grid() const { return grid_; }
  [[nodiscard]] SharedMesh& shared() { return shared_; }
  [[nodiscard]] Mesh& column() { return column_; }
  [[nodiscard]] size_t hosts() const { return static_cast<size_t>(grid_.hosts); }
  [[nodiscard]] size_t locals() const { return static_cast<size_t>(grid_.locals); }

  /// At least `bytes` of scratch memory, separate from the column's; uninitialized.
  [[nodiscard]] std::byte* scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }

 private:
  Grid grid_;
  SharedMesh shared_;
  Mesh column_;
  std::vector<std::byte> scratch_;
};

/// A reduction in two levels: `within` a host, then `across` hosts. Each factor is applied once.
struct TwoLevels {
  Reduction within, across;
};

/// Returns nothing for averaged or scaled integers: their partial results would be truncated and may not fit the type.
[[nodiscard]] std::optional<TwoLevels> two_levels(const Grid& grid, DType dtype, const Reduction& reduction);

}  // namespace farandole
