#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "transport/nccl_comm.h"

namespace farandole {

/// Returns whether NCCL's reductions give the results of reduce(), but for rounding.
///
/// They do for sums and averages of floating-point numbers, also with factors, which NCCL applies to the inputs; and
/// for sums, products, minima and maxima of whole numbers without factors, and products of floating-point numbers. They
/// do not for minima and maxima of floating-point numbers, of which NaN may get lost, averages of whole numbers, which
/// may overflow, and types that NCCL has not: bool, int16, uint16.
[[nodiscard]] bool nccl_reduces(DType dtype, const Reduction& reduction);

/// One tensor whose parts come from the ranks, or go to them: bytes by rank. In device memory, parts in rank order.
struct DeviceParts {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::vector<size_t> sent;      // parts of `in`; for an allgather not used
  std::vector<size_t> received;  // parts of `out`; for a reducescatter not used
};

// The collectives of NCCL. Pieces and parts are in device memory; the work is in `stream` when they return, as one
// group. All ranks must call them in the same order. They throw as NcclComm::group() does.

void nccl_allreduce(NcclComm& comm, NcclLibrary::Stream stream, std::span<const Piece> pieces, DType dtype,
                    const Reduction& reduction);
void nccl_broadcast(NcclComm& comm, NcclLibrary::Stream stream, std::span<const Piece> pieces, int root);
/// Equal parts go by ncclAllGather, others by a broadcast from each rank.
void nccl_allgather(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors);
/// Equal parts go by ncclReduceScatter, others by a reduction to each rank.
void nccl_reducescatter(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors, DType dtype,
                        const Reduction& reduction);
/// By a send and a receive for each other rank.
void nccl_alltoall(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors);

}  // namespace farandole
