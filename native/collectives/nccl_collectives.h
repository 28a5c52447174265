#pragma once

#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "transport/nccl_comm.h"

namespace farandole {

/// Returns whether NCCL's allreduce gives the results of reduce(), but for rounding.
///
/// It does for sums and averages of floating-point numbers, also with factors, which NCCL applies to the inputs; and
/// for sums, products, minima and maxima of whole numbers without factors, and products of floating-point numbers. It
/// does not for minima and maxima of floating-point numbers, of which NaN may get lost, averages of whole numbers,
/// which may overflow, and types that NCCL has not: bool, int16, uint16.
[[nodiscard]] bool nccl_reduces(DType dtype, const Reduction& reduction);

// The collectives of NCCL. Pieces are in device memory; the work is in `stream` when they return, as one group. All
// ranks must call them in the same order. They throw as NcclComm::group() does.

void nccl_allreduce(NcclComm& comm, NcclLibrary::Stream stream, std::span<const Piece> pieces, DType dtype,
                    const Reduction& reduction);
void nccl_broadcast(NcclComm& comm, NcclLibrary::Stream stream, std::span<const Piece> pieces, int root);

}  // namespace farandole
