#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace farandole {

/// Waits until each operation is done, also when one fails: then no buffer is still being written to. Lets go of the
/// GIL; throws what a signal handler raised (nanobind::python_error).
void wait_for(Engine& engine, std::span<const OperationPtr> operations);

/// One operation under way, or several that were asked for at once, for Python.
class Handle {
 public:
  Handle(std::shared_ptr<Engine> engine, std::span<const OperationPtr> operations);

  [[nodiscard]] bool done() const;

  /// Waits for all, also when one fails, and throws the first failure.
  void wait();

  /// Waits, and returns the memory that the engine allocated for the only operation, as an object for DLPack and the
  /// buffer protocol; None when there is none. Bindings write to it: both protocols hand it out as writable.
  std::optional<nanobind::ndarray<nanobind::array_api>> result();

  /// Waits, and returns the same for each operation, in the order in which they were asked for.
  std::vector<std::optional<nanobind::ndarray<nanobind::array_api>>> results();

  std::vector<int64_t> received_splits();

  int last_joined();

 private:
  [[nodiscard]] std::span<const OperationPtr> operations() const {
    return single_ ? std::span(&single_, 1) : std::span(several_);
  }
  [[nodiscard]] const OperationPtr& only() const;

  std::shared_ptr<Engine> engine_;
  OperationPtr single_;  // kept apart from several, so that it takes no memory of its own
  std::vector<OperationPtr> several_;
};

}  // namespace farandole
