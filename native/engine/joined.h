#pragma once

#include <map>
#include <optional>
#include <vector>

#include "base/error.h"
#include "engine/operation.h"
#include "engine/request.h"

namespace farandole {

/// The ranks that have joined. They make no more requests, and take part in those of the others until all have joined.
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

/// Returns an error if the equal requests in `asked` cannot run because the ranks without a request have joined: data
/// would be lost that only a joined rank could give or take. The error names it by the job's number; see job_rank().
[[nodiscard]] std::optional<Error> impossible_with_joined(const std::vector<std::optional<Request>>& asked,
                                                          const std::vector<int>& members);

/// A joined rank's side of the others' request, which does not change the result. Zeros for sums, the largest value for
/// Min, the smallest for Max, one for Product; no rows for allgather and alltoall.
[[nodiscard]] OperationPtr stand_in(const Request& request, int size);

}  // namespace farandole
