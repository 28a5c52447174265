#pragma once

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// Reduces a bucket in place in the ranks' arenas: each rank reduces one share of it, reading from all arenas and
/// writing to all. Returns false, with nothing done, unless on every rank each piece is in place and in that rank's
/// arena; all ranks get the same answer. All ranks must call it, or none.
[[nodiscard]] bool shm_direct_allreduce(SharedMesh& mesh, const BucketView& bucket, DType dtype,
                                        const Reduction& reduction);

}  // namespace farandole
