#pragma once

#include <span>

#include "base/reduce.h"
#include "collectives/piece.h"
#include "collectives/world.h"

namespace farandole {

/// Sums every float32 tensor of a bucket over all ranks through blocks of 8-bit integers (base/int8_blocks.h); every
/// rank gets the same bits. Returns the algorithm's name for the timeline.
///
/// Each rank quantises its tensors and owns one of N segments of the blocks. It gets every rank's blocks of its
/// segment, adds them in float32 in the order of ranks, applies the factors, quantises the sum, and sends it to all
/// ranks. A value is thus rounded twice, but integers are never added, so nothing overflows. Blocks do not cross
/// tensors: how tensors share buckets changes no bit. A rank sends 2 (N-1)/N of the blocks' bytes.
///
///   links:   chunk by chunk, so that the ranks compute while the network moves other chunks (`link_int8_allreduce`)
///   grid:    the ranks of a host add in float32 first, so a value is rounded once a host (`grid_int8_allreduce`)
///   others:  alltoall and allgather; two copies of the blocks. The bits are those of links
///
/// Blocks until all ranks take part; throws `PeerLost`.
const char* int8_allreduce(World& world, int rank, int size, std::span<const Piece> pieces, const Reduction& reduction);

}  // namespace farandole
