// Sets of ranks, and the tree of control connections.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "engine/tree.h"

using namespace farandole;

namespace {

RankSet set_of(std::initializer_list<int> ranks) {
  RankSet set;
  for (const int rank : ranks) set.add(rank);
  return set;
}

void test_sets_of_ranks() {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::set<int> few, many;
    for (int i = 0; i < 20; ++i) few.insert(static_cast<int>(random() % 300));
    for (int i = 0; i < 60; ++i) many.insert(static_cast<int>(random() % 4096));
    RankSet a, b;
    for (const int rank : few) a.add(rank), a.add(rank);
    for (const int rank : many) b.add(rank);
    const bool apart = std::none_of(few.begin(), few.end(), [&](int rank) { return many.contains(rank); });
    CHECK(a.meets(b) == !apart && b.meets(a) == !apart);
    CHECK_EQ(a.count(), few.size());
    if (!apart) continue;
    a.add(b);
    few.merge(many);
    std::set<int> got;
    a.each([&](int rank) { CHECK(got.insert(rank).second && a.has(rank)); });
    CHECK(got == few && a.count() == few.size());
    a.clear();
    CHECK(a.empty() && !a.has(*few.begin()));
    a.add(7);
    CHECK(a.has(7) && a.meets(set_of({7})) && !a.meets(set_of({8, 1000})));
  }
}

void test_trees() {
  Tree tree({-1, 0, 0, 1, 3});
  const RankSet& below = tree.below(1);
  CHECK(below.count() == 3 && below.has(1) && below.has(3) && below.has(4));
  CHECK(tree.is_below(4, 1) && tree.is_below(1, 1) && tree.is_below(4, 0) && !tree.is_below(4, 2) &&
        !tree.is_below(1, 3));
  CHECK(tree.children(0) == (std::vector<int>{1, 2}) && tree.parent(4) == 3);
  CHECK(tree.holds(4) && !tree.holds(5) && !tree.holds(-1));
  for (const std::vector<int>& none : {std::vector<int>{}, {0}, {-1, -1}, {-1, 2, 1}, {-1, 0, 3}, {-1, 1}})
    CHECK(CHECK_THROWS(Error, Tree(none)).kind == ErrorKind::Internal);
}

}  // namespace

int main() {
  test_sets_of_ranks();
  test_trees();
  return check::report();
}
