#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "engine/staging.h"
#include "plugins/core_table.h"

namespace farandole::plugins {

/// Thrown when no engine serves a request.
class NotStarted : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[nodiscard]] RequestView view_of(const Request& request, const std::string& name);
[[nodiscard]] TensorView view_of(const Tensor& tensor);

/// Starts `request` in `engine` under `name`. Calls the listener when all members have completed. If it throws Error,
/// nothing was started, and the listener is not called.
void start(const Request& request, const std::string& name, const Listener& listener, Engine& engine);

/// Runs `request` under `name` on tensors in the memory of the device of `stream`, and reports its outcome to the
/// listener. Blocks. If it throws Error, the listener was not called.
void run_on_device(const Request& request, const std::string& name, CudaDevice::Stream stream, const Listener& listener,
                   Staging& staging);

/// Reports the outcome of an operation that has completed, with or without an error.
void report(const Listener& listener, const Operation& operation) noexcept;

/// Reports a failure to `listener`.
void report(const Listener& listener, int32_t error, const std::string& text) noexcept;

}  // namespace farandole::plugins
