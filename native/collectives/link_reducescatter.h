#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "transport/mesh.h"

namespace farandole {

/// Reduces `in` over all ranks and leaves this rank's part in `out`: `counts[r]` elements for rank r, in rank order,
/// zero allowed.
///
/// `in` holds the sum of `counts` elements; `out` may not overlap it, but for the own part in its place. Bits and
/// rounding as with `link_allreduce`. Every rank sends and receives (N-1)/N of the bytes in one step, chunk by chunk,
/// one stream per peer. Throws what the guard throws, and `peer_lost`; the links are unusable after that.
void link_reducescatter(Mesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                        const Reduction& reduction);

}  // namespace farandole
