// Small allreduces between hosts: the inputs go up with the requests, the coordinator reduces them, and the results
// come down in the plan. So such an operation takes two messages per rank one after the other, and no exchange of data.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/operation.h"
#include "engine/plan.h"
#include "engine/request.h"

namespace farandole {

/// The most bytes of inputs, together, in the requests that a rank makes at a time. All pass through the coordinator,
/// so more of them take less time directly between the ranks.
inline constexpr size_t kCarriedBytes = 1 << 10;

/// Returns whether the coordinator can reduce such inputs.
[[nodiscard]] bool can_carry(const Request& request);

/// Returns the result for the inputs of all ranks, with the same bits as any other algorithm for one rank per host.
/// Empty if an input is missing.
[[nodiscard]] Bytes reduce_carried(const Request& request, std::span<const Bytes> inputs);

/// Returns whether the results of `bucket` are in its plan.
[[nodiscard]] bool has_results(const Bucket& bucket);

/// Copies the results of `bucket` to the outputs; `operations[i]` belongs to its entry i. Throws Error (Internal) if
/// they do not match.
void store_results(const Bucket& bucket, std::span<const OperationPtr> operations);

}  // namespace farandole
