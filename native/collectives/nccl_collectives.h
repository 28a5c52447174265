#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "transport/nccl_comm.h"

namespace farandole {

/// Returns whether NCCL's reduction gives the result of reduce(), except for rounding.
///
/// It does for sums and averages of floats, also with factors, which NCCL applies to the inputs; for products of floats
/// without factors; and for sums, products, minima and maxima of integers without factors. It does not for minima and
/// maxima of floats, which may lose a NaN; for averages of integers, which may overflow; and for types that NCCL lacks:
/// bool, int16 and uint16.
[[nodiscard]] bool nccl_reduces(DType dtype, const Reduction& reduction);

/// One tensor in device memory that has a part for each rank, or from each rank, in rank order.
struct DeviceParts {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::vector<size_t> sent;      // bytes of the parts of `in`, by rank; an allgather does not use it
  std::vector<size_t> received;  // bytes of the parts of `out`, by rank; a reducescatter does not use it
};

// The collectives of NCCL on device memory. Each enqueues its work in `stream` as one group, and returns once the work
// is there. All ranks must call them in the same order. They throw as NcclComm::group() does.

void nccl_allreduce(NcclComm& comm, NcclLibrary::Stream stream, std::span<const Piece> pieces, DType dtype,
                    const Reduction& reduction);
void nccl_broadcast(NcclComm& comm, NcclLibrary::Stream stream, std::span<const Piece> pieces, int root);
/// Uses ncclAllGather for equal parts, and a broadcast from each rank for others.
void nccl_allgather(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors);
/// Uses ncclReduceScatter for equal parts, and a reduction to each rank for others.
void nccl_reducescatter(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors, DType dtype,
                        const Reduction& reduction);
/// Uses a send and a receive for each rank.
void nccl_alltoall(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors);

}  // namespace farandole
