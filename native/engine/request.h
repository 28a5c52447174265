#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/reduce.h"
#include "engine/kinds.h"

namespace farandole {

using Bytes = std::vector<std::byte>;

/// One rank's request: the fields that must agree between ranks, and the sizes that may differ.
struct Request {
  std::string name;
  Kind kind = Kind::Barrier;
  DType dtype = DType::UInt8;
  ReduceOp op = ReduceOp::Sum;
  /// The name will recur with the same signature, so the coordinator gives it a number.
  bool cacheable = false;
  bool on_device = false;  // the tensor lies in the memory of a GPU
  double prescale = 1;
  double postscale = 1;
  int32_t root = 0;
  std::vector<int64_t> shape;
  /// Alltoall: rows of the first dimension for each rank, in rank order.
  std::vector<int64_t> splits;
  /// Members of a group run together: none starts before all `group_size` members are ready on all ranks.
  std::string group;
  uint32_t group_size = 0;

  bool operator==(const Request&) const = default;

  [[nodiscard]] size_t elements() const;
  /// Elements of one row, that is, of all dimensions but the first.
  [[nodiscard]] size_t row_elements() const;
  [[nodiscard]] size_t bytes() const { return elements() * size_of(dtype); }

  /// "float32[10, 2]".
  [[nodiscard]] std::string type_text() const;
};

/// Throws Error (Invalid) for a request that no rank of a world of `size` could run, whatever the others request. Fills
/// in the even splits of an alltoall without splits.
void validate(Request& request, int size);

}  // namespace farandole
