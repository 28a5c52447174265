#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace farandole {

/// Waits until each operation is done, also when one fails: then no buffer is still being written to. Lets go of the
/// GIL; throws what a signal handler raised (nanobind::python_error).
void wait_for(Engine& engine, std::span<const OperationPtr> operations);

/// One operation under way, for Python.
class Handle {
 public:
  Handle(std::shared_ptr<Engine> engine, OperationPtr operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}

  bool done() const { return operation_->done(); }
  const std::string& name() const { return operation_->request.name; }

  /// Throws Error when the operation failed.
  void wait();

  /// The memory that the engine allocated, as an object for DLPack and the buffer protocol; None when there is none.
  /// Bindings write to it: both protocols hand it out as writable.
  std::optional<nanobind::ndarray<nanobind::array_api>> result();

  std::vector<int64_t> received_splits();

  int last_joined();

 private:
  std::shared_ptr<Engine> engine_;
  OperationPtr operation_;
};

/// Several operations that were asked for at once.
class GroupHandle {
 public:
  GroupHandle(std::shared_ptr<Engine> engine, std::vector<OperationPtr> operations)
      : engine_(std::move(engine)), operations_(std::move(operations)) {}

  bool done() const;

  /// Waits for all, also when one fails, and throws the first failure.
  void wait();

  /// A handle for each operation, in the order in which they were asked for.
  std::vector<Handle> parts() const;

 private:
  std::shared_ptr<Engine> engine_;
  std::vector<OperationPtr> operations_;
};

}  // namespace farandole
