#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "engine/engine.h"
#include "plugins/core_table.h"

namespace farandole::plugins {

/// There is no engine for what is asked for.
class NotStarted : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Asks `engine` under `name`; the listener hears of it when all members are done. Throws Error when nothing was asked
/// for: then the listener has not heard anything.
void start(const Ask& ask, const std::string& name, const Listener& listener, Engine& engine);

/// Tells `listener` of a failure.
void tell(const Listener& listener, int32_t error, const std::string& text) noexcept;

}  // namespace farandole::plugins
