#pragma once

#include <string>
#include <vector>

#include "engine/request.h"
#include "plugins/core_table.h"
#include "plugins/tensorflow/api.h"

namespace farandole::tensorflow {

/// The core's functions, set by Python. Operations fail until then.
extern const plugins::CoreTable* core;

/// The names of an operation's inputs and outputs.
using Arguments = std::vector<std::string>;

/// Registers the kernels for `kind` as TensorFlow's operation `op`. Returns whether it succeeded.
///
/// There is one kernel for the CPU and one for GPUs. The arguments of both are in host memory; TensorFlow copies
/// tensors that are on a GPU. Its C interface gives a stream (TF_GetStream) only for devices that are plugins
/// themselves, and without a stream a kernel cannot know when GPU memory has its values.
[[nodiscard]] bool register_collective(const char* op, Kind kind, const Arguments& arguments);

/// Registers the kernels that return this rank's numbers at run time. Returns whether it succeeded.
[[nodiscard]] bool register_place(const char* op, const Arguments& arguments);

}  // namespace farandole::tensorflow
