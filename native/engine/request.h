#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/reduce.h"

namespace farandole {

enum class Kind : uint8_t {
  Allreduce = 0,
  Allgather = 1,
  Broadcast = 2,
  Alltoall = 3,
  Reducescatter = 4,
  Barrier = 5,
  Join = 6,  // this rank has nothing more to ask for: until all have joined, it counts as asking for what others do
};

inline constexpr uint8_t kKinds = 7;

const char* name_of(Kind kind);

/// What one rank asks for: everything that must agree between the ranks, and the sizes that may differ.
struct Request {
  std::string name;
  Kind kind = Kind::Barrier;
  DType dtype = DType::UInt8;
  ReduceOp op = ReduceOp::Sum;
  /// The name will come again with the same signature, so it is worth a number of its own.
  bool cacheable = false;
  double prescale = 1;
  double postscale = 1;
  int32_t root = 0;
  std::vector<int64_t> shape;
  /// Alltoall: rows of the first dimension for each rank, in rank order.
  std::vector<int64_t> splits;
  /// Members of one group run together: nothing starts before all `group_size` members are ready on all ranks.
  std::string group;
  uint32_t group_size = 0;

  bool operator==(const Request&) const = default;

  [[nodiscard]] size_t elements() const;
  /// Elements of one row, that is of everything behind the first dimension.
  [[nodiscard]] size_t row_elements() const;
  [[nodiscard]] size_t bytes() const { return elements() * size_of(dtype); }

  /// "float32[10, 2]".
  [[nodiscard]] std::string type_text() const;
};

/// True for kinds whose result has a size of its own, which the plan tells.
bool is_sized_by_plan(Kind kind);

/// True for kinds whose plan depends on nothing but the request, so that a number can stand for it.
bool repeats_exactly(Kind kind);

/// Throws Error (Invalid) for what no rank could run in a world of `size`, whatever the others ask for. Fills in the
/// even splits of an alltoall that names none.
void validate(Request& request, int size);

}  // namespace farandole
