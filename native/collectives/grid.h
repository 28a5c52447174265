#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "base/reduce.h"
#include "transport/mesh.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// Several hosts with equally many ranks, more than one: the hosts are rows, and the ranks with the same place on their
/// host are a column. Hosts count in the order of their first ranks.
struct Grid {
  int hosts;
  int locals;
  int host, local;         // of this rank
  std::vector<int> ranks;  // row by row

  [[nodiscard]] int rank_at(int at_host, int at_local) const {
    return ranks[static_cast<size_t>(at_host * locals + at_local)];
  }
  /// The host and the place there of `rank`.
  [[nodiscard]] std::pair<int, int> place_of(int rank) const;
};

/// The grid that rank `rank` is part of, when `hosts[r]` is the host of rank r; nothing when they make none.
[[nodiscard]] std::optional<Grid> grid_of(int rank, const std::vector<int>& hosts);

/// The ranks of other hosts that `rank` exchanges data with: its column, or everybody when there is no grid, or when
/// the world is to work in one level too (`flat`).
[[nodiscard]] std::vector<int> data_peers(int rank, const std::vector<int>& hosts, bool flat = false);

/// What the two-level algorithms run over: the memory of the host, and links to the own column only.
class GridMesh {
 public:
  /// `shared` counts the ranks of this host, `column` has a link per host.
  GridMesh(Grid grid, SharedMesh shared, Mesh column)
      : grid_(std::move(grid)), shared_(std::move(shared)), column_(std::move(column)) {}

  [[nodiscard]] const Grid& grid() const { return grid_; }
  [[nodiscard]] SharedMesh& shared() { return shared_; }
  [[nodiscard]] Mesh& column() { return column_; }
  [[nodiscard]] size_t hosts() const { return static_cast<size_t>(grid_.hosts); }
  [[nodiscard]] size_t locals() const { return static_cast<size_t>(grid_.locals); }

  /// At least `bytes` of scratch memory, other than the column's; the content is undefined.
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

/// A reduction in two levels: `within` a host, then `across` hosts. Every factor is applied once.
struct TwoLevels {
  Reduction within, across;
};

/// Nothing where two levels cannot give what one gives: integers that are averaged or scaled, whose partial results
/// would be truncated and may not fit their type.
[[nodiscard]] std::optional<TwoLevels> two_levels(const Grid& grid, DType dtype, const Reduction& reduction);

}  // namespace farandole
