#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/dtype.h"
#include "base/reduce.h"

/// The interface between MPItrampoline, which jaxlib contains, and the library that MPITRAMPOLINE_LIB names: functions
/// and constants of MPI whose names begin with MPIABI_. Handles have the size of a pointer, and the library chooses
/// their values.
namespace farandole::mpi {

class Communicator;

inline constexpr int kSuccess = 0;
inline constexpr int kFailed = 16;  // MPI_ERR_OTHER
inline constexpr int kThreadMultiple = 3;
inline constexpr int kUndefined = -601;
inline constexpr size_t kMaxErrorText = 512;  // with its end; compiled into MPItrampoline's users

/// A datatype: one element of the core's, or a pair of them for a complex number.
using Datatype = intptr_t;
inline constexpr Datatype kComplex = 0x100;

[[nodiscard]] constexpr Datatype handle_of(DType dtype) { return 1 + static_cast<Datatype>(dtype); }

struct Element {
  DType dtype;
  size_t count;  // 2: a complex number

  [[nodiscard]] size_t bytes() const { return count * size_of(dtype); }
};

/// Returns null for a datatype that JAX does not use.
[[nodiscard]] inline std::optional<Element> element_of(Datatype handle) {
  const Datatype value = (handle & ~kComplex) - 1;
  if (value < 0 || value >= kDTypes) return std::nullopt;
  return Element{static_cast<DType>(value), (handle & kComplex) != 0 ? size_t{2} : size_t{1}};
}

using Op = intptr_t;

[[nodiscard]] constexpr Op handle_of(ReduceOp op) { return 1 + static_cast<Op>(op); }

/// Returns null for an operation that JAX does not use.
[[nodiscard]] inline std::optional<ReduceOp> reduction_of(Op handle) {
  for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product})
    if (handle_of(op) == handle) return op;
  return std::nullopt;
}

}  // namespace farandole::mpi
