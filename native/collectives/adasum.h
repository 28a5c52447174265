#pragma once

#include <span>

#include "base/dtype.h"
#include "collectives/piece.h"
#include "collectives/world.h"

namespace farandole {

/// Combines every tensor of a bucket over all ranks by adaptive summation (Maleki et al., "Scaling Distributed Training
/// with Adaptive Summation", 2020); every rank gets the same bits.
///
/// Two gradients a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b. That is their sum if they are orthogonal
/// and their mean if they are equal; a gradient of zeros changes nothing. Neighbouring ranks are combined in pairs,
/// then pairs of pairs, for any number of ranks. Each tensor has its own coefficients. How tensors share buckets
/// changes only the rounding of the dot products, which are computed in fp64. float16, bfloat16 and float32 are
/// combined in float32, float64 in float64, and rounded once. The factors are applied in the same type: `prescale`
/// before and `postscale` after the combination.
///
/// Rank r owns one of N shards of the elements. An alltoall brings it every rank's shard, each of the log2(N) levels
/// takes one small allreduce of dot products, and an allgather distributes the shards. A rank moves 2 (N-1)/N of the
/// bucket. It holds a copy of the bucket in the type of the computation, and a packed copy if the bucket has several
/// tensors. Blocks until all ranks take part; throws `PeerLost`.
void adasum(World& world, int rank, int size, std::span<const Piece> pieces, DType dtype, double prescale,
            double postscale);

}  // namespace farandole
