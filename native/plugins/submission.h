#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "engine/engine.h"
#include "plugins/core_table.h"

namespace farandole::plugins {

/// There is no engine for a request.
class NotStarted : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Starts `request` in `engine` under `name`; calls the listener when all members are done. Throws Error when nothing
/// was started: then the listener has not been called.
void start(const Request& request, const std::string& name, const Listener& listener, Engine& engine);

/// Reports a failure to `listener`.
void tell(const Listener& listener, int32_t error, const std::string& text) noexcept;

}  // namespace farandole::plugins
