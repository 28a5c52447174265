#pragma once

#include <span>
#include <vector>

#include "collectives/nccl_collectives.h"
#include "device/cuda_device.h"
#include "device/device_memory.h"
#include "engine/operation.h"
#include "engine/plan.h"
#include "transport/nccl_comm.h"

namespace farandole {

/// Returns the bytes of the operation's parts, by rank, according to the plan's `entry`. For an alltoall it also sets
/// the operation's received splits. Throws Error (Internal) if operation and entry do not match. Otherwise pure.
[[nodiscard]] DeviceParts parts_of(Operation& operation, const Entry& entry, int rank, int size);

/// One bucket of operations in device memory, which NCCL runs as one group.
class DeviceRun {
 public:
  /// `stream` is the communicator's stream.
  DeviceRun(NcclComm& comm, CudaDevice& device, CudaDevice::Stream stream, int size)
      : comm_(comm), device_(device), stream_(stream), size_(size) {}

  /// Enqueues the operations behind the work of their callers' streams. For an operation of a joined rank, allocates
  /// memory. Throws what NcclComm::group() throws.
  void enqueue(const Bucket& bucket, std::span<const OperationPtr> operations);

 private:
  void follow(std::span<const OperationPtr> operations);
  std::vector<Piece> pieces_of(std::span<const OperationPtr> operations);
  std::vector<DeviceParts> placed(const Bucket& bucket, std::span<const OperationPtr> operations);

  NcclComm& comm_;
  CudaDevice& device_;
  const CudaDevice::Stream stream_;
  const int size_;
};

}  // namespace farandole
