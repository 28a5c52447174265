#include "collectives/grid.h"

#include <algorithm>
#include <tuple>

namespace farandole {

std::pair<int, int> Grid::place_of(int rank) const {
  const auto at = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  return {at / locals, at % locals};
}

std::optional<Grid> grid_of(int rank, const std::vector<int>& hosts) {
  std::vector<int> order;  // of the hosts
  std::vector<std::vector<int>> rows;
  for (size_t each = 0; each < hosts.size(); ++each) {
    const auto row = static_cast<size_t>(std::find(order.begin(), order.end(), hosts[each]) - order.begin());
    if (row == order.size()) {
      order.push_back(hosts[each]);
      rows.emplace_back();
    }
    rows[row].push_back(static_cast<int>(each));
  }
  const size_t locals = rows.front().size();
  if (rows.size() < 2 || locals < 2) return std::nullopt;
  if (!std::ranges::all_of(rows, [&](const auto& row) { return row.size() == locals; })) return std::nullopt;
  Grid grid{static_cast<int>(rows.size()), static_cast<int>(locals), 0, 0, {}};
  for (const auto& row : rows) grid.ranks.insert(grid.ranks.end(), row.begin(), row.end());
  std::tie(grid.host, grid.local) = grid.place_of(rank);
  return grid;
}

std::vector<int> data_peers(int rank, const std::vector<int>& hosts, bool flat) {
  std::vector<int> peers;
  if (const auto grid = grid_of(rank, hosts); grid && !flat) {
    for (int host = 0; host < grid->hosts; ++host)
      if (host != grid->host) peers.push_back(grid->rank_at(host, grid->local));
    std::ranges::sort(peers);
    return peers;
  }
  for (size_t peer = 0; peer < hosts.size(); ++peer)
    if (hosts[peer] != hosts[static_cast<size_t>(rank)]) peers.push_back(static_cast<int>(peer));
  return peers;
}

std::optional<TwoLevels> two_levels(const Grid& grid, DType dtype, const Reduction& reduction) {
  TwoLevels levels{reduction, reduction};
  levels.within.postscale = levels.across.prescale = 1;
  levels.within.divisor = 1;
  const bool averages = reduction.op == ReduceOp::Average;
  if (!is_floating(dtype)) {
    if (averages || reduction.prescale != 1 || reduction.postscale != 1) return std::nullopt;
    return levels;
  }
  if (averages && size_of(dtype) == 2) {
    // A host's sum may overflow fp16 where its average does not.
    levels.within.divisor = grid.locals;
    levels.across.divisor = grid.hosts;
  } else if (averages) {
    levels.within.op = ReduceOp::Sum;
  }
  return levels;
}

}  // namespace farandole
