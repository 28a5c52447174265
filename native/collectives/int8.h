#pragma once

#include <span>

#include "base/reduce.h"
#include "collectives/piece.h"
#include "collectives/world.h"

namespace farandole {

/// Sums every float32 tensor of a bucket over all ranks through blocks of 8-bit integers (base/int8_blocks.h); every
/// rank gets the same bits, which do not depend on the hosts.
///
/// Each rank quantises its tensors and owns one of N shards of the blocks. An alltoall brings it every rank's blocks of
/// its shard. It adds them in float32 in the order of ranks, applies the factors, and quantises the sum. An allgather
/// distributes the shards. A value is thus rounded twice, but integers are never added, so nothing overflows. Blocks do
/// not cross tensors: how tensors share buckets changes no bit. A rank sends 2 (N-1)/N of the blocks' bytes, over the
/// hosts' links too, and holds two copies of the blocks. Blocks until all ranks take part; throws `PeerLost`.
void int8_allreduce(World& world, int rank, int size, std::span<const Piece> pieces, const Reduction& reduction);

}  // namespace farandole
