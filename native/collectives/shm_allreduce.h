#pragma once

#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// Reduces a bucket over all ranks of one host; every rank gets the same bits.
///
/// Small buckets: every rank shows its bytes and combines everybody's, in rank order. Larger ones: chunked
/// reduce-scatter and allgather through the slots, each rank reducing one segment of every stripe.
/// Per rank it moves 2 (N-1)/N of the bucket through the cache. Blocks until all ranks take part; throws `PeerLost`.
/// Returns what people call the way that was taken.
const char* shm_allreduce(SharedMesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction);

/// Reduces `in` over all ranks and leaves in `out` this rank's part: `counts[r]` elements for rank r, in rank order.
void shm_reducescatter(SharedMesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts,
                       DType dtype, const Reduction& reduction);

}  // namespace farandole
