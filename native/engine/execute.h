#pragma once

#include <span>

#include "collectives/world.h"
#include "engine/operation.h"
#include "engine/plan.h"

namespace farandole {

/// Runs one bucket of a plan: `operations[i]` is this rank's side of `bucket.entries[i]`; results whose size
/// only the plan tells come from `pool`. Blocks until this rank's part
/// is done; throws what the collectives throw, and Error (Internal) when bucket and operations do not fit. Returns what
/// people call the algorithm that ran.
const char* execute(World& world, ResultPool& pool, int rank, int size, const Bucket& bucket,
                    std::span<const OperationPtr> operations);

/// How the ranks' values of an allreduce or reducescatter become one.
[[nodiscard]] Reduction reduction_of(const Request& request, int size);

/// Rows of the first dimension that rank `owner` gets of a reducescatter: the first `rows % size` ranks get one more.
[[nodiscard]] int64_t scattered_rows(int64_t rows, int owner, int size);

}  // namespace farandole
