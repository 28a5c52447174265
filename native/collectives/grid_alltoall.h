#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "collectives/grid.h"

namespace farandole {

/// How many bytes one rank sends to another: the same on all ranks.
using Shares = std::function<size_t(int from, int to)>;

/// Sends `shares(rank, r)` bytes at `in[r]` to rank r and receives `shares(r, rank)` bytes of rank r at `out[r]`, zero
/// allowed.
///
/// Within the host, bytes go to the rank in whose column their destination is; then over the columns. Inputs and
/// outputs may not overlap, but for the own part. Throws what the guard throws, and `peer_lost`; the connections are
/// unusable after that.
void grid_alltoall(GridMesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                   const Shares& shares);

}  // namespace farandole
