#pragma once

#include <map>
#include <optional>
#include <vector>

#include "base/error.h"
#include "engine/operation.h"
#include "engine/request.h"

namespace farandole {

/// Who has joined: asks for nothing any more, and takes part in what the others ask for until all have joined.
/// Used by the negotiator; pure.
class Joined {
 public:
  explicit Joined(int size) : ranks_(static_cast<size_t>(size)) {}

  [[nodiscard]] bool any() const { return count_ > 0; }
  [[nodiscard]] bool all() const { return count_ == ranks_.size(); }
  [[nodiscard]] bool has(size_t rank) const { return ranks_[rank]; }
  [[nodiscard]] int last() const { return last_; }
  [[nodiscard]] std::vector<int> missing() const;

  /// Throws Error (Internal) when `rank` joins twice.
  void add(int rank);
  void clear();

 private:
  std::vector<bool> ranks_;
  size_t count_ = 0;
  int last_ = -1;
};

/// Why what the ranks of `asked` ask for alike cannot run while the ranks without a request have joined, if it cannot:
/// something would be lost that only a joined rank could give or take.
[[nodiscard]] std::optional<Error> impossible_with_joined(const std::vector<std::optional<Request>>& asked);

/// A joined rank's side of what the others ask for; it changes nobody's result. Zeros for sums, the largest value for
/// Min, the smallest for Max, one for Product; no rows for gathering and exchanging.
[[nodiscard]] OperationPtr stand_in(const Request& request, int size);

}  // namespace farandole
