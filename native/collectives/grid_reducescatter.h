#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/grid.h"

namespace farandole {

/// Reduces `in` over all ranks of the grid and leaves this rank's part in `out`: `counts[r]` elements for rank r, in
/// rank order, zero allowed.
///
/// Within the host the parts of a column go to the local rank of that column, which then reduces them over the column.
/// Bits and rounding as with `grid_allreduce`. Throws what the guard throws, and `peer_lost`; the connections are
/// unusable after that.
void grid_reducescatter(GridMesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts,
                        DType dtype, const Reduction& reduction);

}  // namespace farandole
