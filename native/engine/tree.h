#pragma once

#include <unordered_map>
#include <vector>

#include "engine/rank_set.h"

namespace farandole {

/// The tree of control connections. Rank 0, the coordinator, is its root; a rank exchanges messages with its parent and
/// its children.
class Tree {
 public:
  /// `parents[r]` is the parent of rank r, -1 for rank 0. Throws Error (Internal) unless all paths lead to rank 0.
  explicit Tree(std::vector<int> parents);

  [[nodiscard]] int size() const { return static_cast<int>(parents_.size()); }
  [[nodiscard]] int parent(int rank) const { return parents_[static_cast<size_t>(rank)]; }
  [[nodiscard]] const std::vector<int>& children(int rank) const { return children_[static_cast<size_t>(rank)]; }
  [[nodiscard]] bool holds(int rank) const { return rank >= 0 && rank < size(); }

  /// Returns whether `ancestor` is `rank` or on its path to the coordinator.
  [[nodiscard]] bool is_below(int rank, int ancestor) const;

  /// `rank` and all ranks below it.
  [[nodiscard]] const RankSet& below(int rank);

 private:
  std::vector<int> parents_;
  std::vector<std::vector<int>> children_;
  std::unordered_map<int, RankSet> below_;  // filled on use
};

}  // namespace farandole
