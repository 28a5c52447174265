#pragma once

#include <span>

#include "collectives/world.h"
#include "engine/operation.h"
#include "engine/plan.h"

namespace farandole {

/// Runs one bucket of a plan. `operations[i]` is this rank's side of `bucket.entries[i]`. Results that are sized by the
/// plan come from `pool`. Blocks until this rank's part is done. Throws what the collectives throw, and Error
/// (Internal) if bucket and operations do not match. Returns the name of the algorithm.
const char* execute(World& world, ResultPool& pool, int rank, int size, const Bucket& bucket,
                    std::span<const OperationPtr> operations);

/// The reduction of an allreduce or reducescatter.
[[nodiscard]] Reduction reduction_of(const Request& request, int size);

/// Sets the shape of a result of `rows` rows, and returns its bytes. If the caller's memory does not fit, sets the
/// operation's error: it fails on this rank only, because the others need its part in the collective.
size_t size_result(Operation& operation, int64_t rows);

/// Rows of a reducescatter for rank `owner`: the first `rows % size` ranks get one more.
[[nodiscard]] int64_t scattered_rows(int64_t rows, int owner, int size);

}  // namespace farandole
