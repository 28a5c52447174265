#pragma once

#include <span>

#include "collectives/grid.h"
#include "collectives/piece.h"

namespace farandole {

/// Brings the inputs of `root` to the outputs of all ranks of the grid, the root's own too.
///
/// H hosts, L ranks each, S bytes:
///   small S:  over the root's column, then through memory in every host
///   large S:  through memory in the root's host, then each column brings one of L shards to the other hosts, whose
///             ranks show them to each other
/// Throws what the guard throws, and `peer_lost`; the connections are unusable after that.
void grid_broadcast(GridMesh& mesh, std::span<const Piece> pieces, int root);

}  // namespace farandole
