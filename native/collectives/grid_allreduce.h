#pragma once

#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/grid.h"
#include "collectives/piece.h"

namespace farandole {

/// Reduces a bucket over all ranks of a grid; every rank gets the same bits.
///
/// An element is combined over the ranks of each host, in rank order, then over the hosts, whatever the size; 16 bit
/// types are rounded once at each of the two levels. H hosts of L ranks, S bytes:
///   small S:  through memory in the host, then every rank with its column: one hop each
///   large S:  each rank reduces one of L shards within its host, then over its column, and shows the result to its
///             host; chunk by chunk, so that memory and network work at the same time, unless there are too many hosts
///             for the slots. A host sends 2 (H-1)/H S bytes.
/// Integers that are averaged or scaled travel whole to every rank, to be combined there at once. Blocks until all
/// ranks take part. Throws what the guard throws, and `peer_lost`; the connections are unusable after that. Returns
/// what people call the way that was taken.
const char* grid_allreduce(GridMesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction);

}  // namespace farandole
