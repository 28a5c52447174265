#include "engine/tree.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {

Tree::Tree(std::vector<int> parents) : parents_(std::move(parents)), children_(parents_.size()) {
  for (int rank = 0; rank < size(); ++rank) {
    const int above = parent(rank);
    if (rank == 0 ? above != -1 : !holds(above))
      throw Error::internal("rank " + std::to_string(rank) + " cannot have rank " + std::to_string(above) +
                            " as its parent");
    if (rank != 0) children_[static_cast<size_t>(above)].push_back(rank);
  }
  if (parents_.empty() || below(0).count() != parents_.size())
    throw Error::internal("the control connections are no tree with rank 0 as its root");
}

bool Tree::is_below(int rank, int through) const {
  while (rank != through && rank != -1) rank = parent(rank);
  return rank == through;
}

const RankSet& Tree::below(int rank) {
  const auto [at, fresh] = below_.try_emplace(rank);
  RankSet& all = at->second;
  std::vector<int> open;
  if (fresh) open.push_back(rank);
  while (!open.empty()) {
    const int next = open.back();
    open.pop_back();
    all.add(next);
    open.insert(open.end(), children(next).begin(), children(next).end());
  }
  return all;
}

}  // namespace farandole
