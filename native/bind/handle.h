#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bind/dlpack.h"
#include "engine/engine.h"
#include "engine/staging.h"

namespace farandole {

inline constexpr std::chrono::milliseconds kSignalsEvery{50};  // the longest delay until Ctrl-C ends a wait

/// Waits until every operation has completed, even if one fails, so that no buffer is written to afterwards. Releases
/// the GIL. Throws the error of a signal handler (nanobind::python_error).
void wait_for(Engine& engine, std::span<const OperationPtr> operations);

/// Operations on device memory under way.
struct StagedPart {
  std::shared_ptr<Staging> staging;
  std::shared_ptr<StagedCall> call;
  const dlpack::ExchangeApi* api = nullptr;  // returns the stream that waits for results; null: the thread waits
};

/// A result of an operation on a device that is still in memory of the engine, because its size came from the plan.
class StagedResult {
 public:
  StagedResult(std::shared_ptr<Engine> engine, StagedPart part, size_t index)
      : engine_(std::move(engine)), part_(std::move(part)), index_(index) {}

  [[nodiscard]] nanobind::tuple shape() const;
  /// Copies the result to `tensor`, which is on the input's device and of the same type and size; works once. Enqueues
  /// the copy in the calling thread's stream. If the tensor's type does not name that stream, blocks until it is done.
  void copy_to(nanobind::handle tensor);

 private:
  std::shared_ptr<Engine> engine_;
  StagedPart part_;
  size_t index_;
};

/// One operation under way, or several that were started at once, for Python.
class Handle {
 public:
  Handle(std::shared_ptr<Engine> engine, std::span<const OperationPtr> operations);
  Handle(std::shared_ptr<Engine> engine, StagedPart staged) : engine_(std::move(engine)), staged_(std::move(staged)) {}

  [[nodiscard]] bool done() const;

  /// Waits for all operations, even if one fails, and throws the first failure. Makes later work in the calling
  /// thread's stream wait for results on devices.
  void wait();

  /// Waits, and returns the memory that the engine allocated for the only operation, as an object with DLPack and the
  /// buffer protocol; None without such memory. Both protocols export it as writable, because bindings write to it. For
  /// an operation on a device, returns a StagedResult.
  nanobind::object result();

  /// Waits, and returns the same for each operation, in the caller's order.
  nanobind::list results();

  std::vector<int64_t> received_splits();

  int last_joined();

  /// Waits, and returns the rank that has sent the received message.
  int source();

 private:
  [[nodiscard]] std::span<const OperationPtr> operations() const {
    return single_ ? std::span(&single_, 1) : std::span(several_);
  }
  [[nodiscard]] size_t count() const { return staged_ ? staged_->call->size() : operations().size(); }
  [[nodiscard]] const OperationPtr& operation(size_t index) const;
  [[nodiscard]] const OperationPtr& only() const;
  [[nodiscard]] nanobind::object result(size_t index) const;
  void wait_staged();

  std::shared_ptr<Engine> engine_;
  OperationPtr single_;  // separate from several operations, so that it needs no allocation
  std::vector<OperationPtr> several_;
  std::optional<StagedPart> staged_;  // instead of both
};

}  // namespace farandole
