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
struct DeviceSide;

/// Callbacks of an operation without a waiting thread. The driving thread or the engine's thread calls them; they must
/// not throw.
struct Listener {
  /// Called once when the operation has completed or failed, without a lock of the engine, so it may submit again.
  void (*done)(void* cookie, Operation& operation) noexcept = nullptr;
  /// Returns memory for a result of `bytes` that is sized by the plan, or null to let the engine allocate it;
  /// `result_shape` is known. Called in the middle of a plan: it must not call the engine. May be null.
  std::byte* (*allocate)(void* cookie, Operation& operation, size_t bytes) noexcept = nullptr;
  void* cookie = nullptr;
};

/// One rank's side of one collective operation, from submission to completion. Shared by the engine and the handle.
class Operation {
 public:
  Request request;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;       // null: the engine allocates `result`
  size_t room = 0;                   // bytes at `output`, for results sized by the plan
  std::shared_ptr<void> keep;        // keeps the tensors alive
  std::shared_ptr<DeviceSide> side;  // if given, `input` and `output` are in device memory
  Listener listener;                 // for operations that the engine's thread drives; set before submission

  // Valid once done.
  std::optional<Error> error;
  std::optional<ResultBuffer> result;
  std::vector<int64_t> result_shape;
  std::vector<int64_t> received_splits;
  int last_joined = -1;
  int source = -1;            // of a received message: the rank that has sent it
  bool is_abandoned = false;  // failed, and the transport may still use its memory; see World::has_abandoned()

  uint64_t submitted_ns = 0;
  uint64_t submitted_ticks = 0;  // 0: not requested here, or not recorded
  uint64_t traced_in = 0;        // the trace's last batch with the name, and the name's number there
  uint32_t trace_name = 0;
  bool stands_in = false;  // made by the engine for a joined rank; this rank has no such request

  [[nodiscard]] bool done() const { return done_.load(std::memory_order_acquire); }
  /// Wakes no thread: a waiting thread drives, or the driving thread notifies it.
  void finish() { done_.store(true, std::memory_order_release); }

  /// Prepares a completed operation for its next request.
  void renew();

 private:
  std::atomic<bool> done_{false};
};

using OperationPtr = std::shared_ptr<Operation>;

/// A request before its tensors are known. Owns nothing.
struct RequestView {
  std::string_view name;
  Kind kind = Kind::Barrier;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  double postscale = 1;
  int32_t root = 0;
  std::span<const int64_t> splits;  // alltoall; empty: equal parts
  bool cacheable = false;
  bool grouped = false;  // the tensors are members of one group
};

/// The memory of one tensor of a request, and of its result.
struct TensorView {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // null: allocated by the engine
  size_t room = 0;              // bytes at `output`
  DType dtype = DType::UInt8;
  std::span<const int64_t> shape;
  bool on_device = false;  // the tensor is in GPU memory; `input` and `output` may be host copies of it
};

/// Sets up `operation` to perform `request` on `tensor`, number `index` of `count`. A null pointer becomes a new
/// operation; an operation of the same name, group and splits, which must be free, is reused. Returns whether its
/// request is new or has changed. Throws Error (Invalid) for a request that no rank of `size` could perform.
bool build(OperationPtr& operation, const RequestView& request, const TensorView& tensor, size_t index, size_t count,
           int size);

}  // namespace farandole
