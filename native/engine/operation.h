#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "engine/request.h"
#include "engine/result_pool.h"

namespace farandole {

class Operation;

/// Who is told of an operation that nobody waits for. Both functions are called by whoever drives, or by the engine's
/// thread, and must not throw.
struct Listener {
  /// The operation is done, well or not; called once, holding no lock of the engine, so it may submit again.
  void (*done)(void* cookie, Operation& operation) noexcept = nullptr;
  /// Returns memory for a result of `bytes` that only the plan sizes, or null for what the engine then allocates
  /// itself; `result_shape` is known. Called in the middle of a plan: it must not come back to the engine. May be null.
  std::byte* (*allocate)(void* cookie, Operation& operation, size_t bytes) noexcept = nullptr;
  void* cookie = nullptr;
};

/// One rank's side of one collective operation, from submission to completion. Shared by the engine and the handle.
class Operation {
 public:
  Request request;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // null: the engine allocates `result`
  size_t room = 0;              // bytes at `output`, of kinds whose result only the plan sizes
  std::shared_ptr<void> keep;   // what must outlive the operation: references to the tensors
  Listener listener;            // set before submission, of operations that the engine's thread is to drive

  // Valid once done.
  std::optional<Error> error;
  std::optional<ResultBuffer> result;
  std::vector<int64_t> result_shape;
  std::vector<int64_t> received_splits;
  int last_joined = -1;

  uint64_t submitted_ns = 0;
  uint64_t submitted_ticks = 0;  // 0: not asked for here, or not looked at the clock
  uint64_t traced_in = 0;        // when the trace last asked for the name, and what it calls it
  uint32_t trace_name = 0;
  bool stands_in = false;  // made by the engine for a rank that has joined: nobody asked for it here

  [[nodiscard]] bool done() const { return done_.load(std::memory_order_acquire); }
  /// Nobody is woken: who waits, drives or is told by whoever drives.
  void finish() { done_.store(true, std::memory_order_release); }

  /// Makes a finished operation one to be asked for again.
  void renew();

 private:
  std::atomic<bool> done_{false};
};

using OperationPtr = std::shared_ptr<Operation>;

/// A request as a caller states it, before its tensors are known. It owns nothing.
struct RequestView {
  std::string_view name;
  Kind kind = Kind::Barrier;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  double postscale = 1;
  int32_t root = 0;
  std::span<const int64_t> splits;  // alltoall; empty: equal parts
  bool cacheable = false;
  bool grouped = false;  // the tensors are the members of one group
};

/// The memory of one tensor of a request, and of its result.
struct TensorView {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // null: the engine allocates the result
  size_t room = 0;              // bytes at `output`
  DType dtype = DType::UInt8;
  std::span<const int64_t> shape;
};

/// Makes `operation` the one that performs `request` on `tensor`, the tensor number `index` of `count`. A null pointer
/// becomes a new operation; an operation of the same name, group and splits, which must be free, is used again. Returns
/// whether its request is new or has changed. Throws Error (Invalid) for a request that no rank of `size` could
/// perform.
bool build(OperationPtr& operation, const RequestView& request, const TensorView& tensor, size_t index, size_t count,
           int size);

}  // namespace farandole
