#pragma once

#include "engine/request.h"
#include "plugins/core_table.h"
#include "plugins/tensorflow/api.h"

namespace farandole::tensorflow {

/// The core's functions, set by Python. Operations fail until then.
extern const plugins::CoreTable* core;

/// Registers the kernel for `kind` as TensorFlow's operation `op`. Returns whether it succeeded.
[[nodiscard]] bool register_collective(const char* op, Kind kind);

/// Registers the kernel that returns this rank's numbers at run time. Returns whether it succeeded.
[[nodiscard]] bool register_place(const char* op);

}  // namespace farandole::tensorflow
