#pragma once

#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "transport/mesh.h"

namespace farandole {

/// Reduces a bucket over all ranks; every rank gets the same bits, the ones that shared memory gives too.
///
/// All inputs of an element are combined at once and in rank order, so 16 bit types are added in fp32 and rounded once,
/// and the result depends neither on the number of bytes nor on what was fused with them. N ranks, S bytes:
///   small S:  every rank gets every input; (N-1) S bytes in one step, or in log2(N) steps when there are many ranks
///   large S:  `SegmentReduce`; 2 (N-1)/N S bytes in two steps, chunk by chunk
/// Blocks until all ranks take part. Throws what the guard throws, and `peer_lost`; the links are unusable after that.
/// Returns what people call the way that was taken.
const char* link_allreduce(Mesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction);

}  // namespace farandole
