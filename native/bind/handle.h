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

/// Waits until every operation has completed, even if one fails, so that no buffer is written to afterwards. Releases
/// the GIL. Throws the error of a signal handler (nanobind::python_error).
void wait_for(Engine& engine, std::span<const OperationPtr> operations);

/// One operation under way, or several that were started at once, for Python.
class Handle {
 public:
  Handle(std::shared_ptr<Engine> engine, std::span<const OperationPtr> operations);

  [[nodiscard]] bool done() const;

  /// Waits for all, even if one fails, and throws the first failure.
  void wait();

  /// Waits, and returns the memory that the engine allocated for the only operation, as an object for DLPack and the
  /// buffer protocol; None without such memory. Bindings write to it: both protocols export it as writable.
  std::optional<nanobind::ndarray<nanobind::array_api>> result();

  /// Waits, and returns the same for each operation, in the caller's order.
  std::vector<std::optional<nanobind::ndarray<nanobind::array_api>>> results();

  std::vector<int64_t> received_splits();

  int last_joined();

 private:
  [[nodiscard]] std::span<const OperationPtr> operations() const {
    return single_ ? std::span(&single_, 1) : std::span(several_);
  }
  [[nodiscard]] const OperationPtr& only() const;

  std::shared_ptr<Engine> engine_;
  OperationPtr single_;  // separate from several operations, so that it needs no allocation
  std::vector<OperationPtr> several_;
};

}  // namespace farandole
