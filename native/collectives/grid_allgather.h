#pragma once

#include <cstddef>
#include <span>

#include "collectives/grid.h"

namespace farandole {

/// Gathers bytes: `bytes[r]` of rank r land at `out[r]` on every rank of the grid. Zero bytes are allowed; `mine` may
/// be the own place in the output.
///
/// First over the column, so that every byte enters a host once, then over the ranks of the host through memory.
/// Throws what the guard throws, and `peer_lost`; the connections are unusable after that.
void grid_allgather(GridMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                    std::span<const size_t> bytes);

}  // namespace farandole
