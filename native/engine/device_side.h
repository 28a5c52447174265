#pragma once

#include <memory>
#include <vector>

#include "device/cuda_device.h"
#include "device/device_memory.h"
#include "device/pinned_pool.h"

namespace farandole {

/// The part of an operation that was submitted with its tensor in device memory.
struct DeviceSide {
  DeviceSide() = default;
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;
  ~DeviceSide() {
    if (after) result.end_after(*after);
  }

  CudaDevice* device = nullptr;
  std::vector<std::shared_ptr<const CudaMark>> before;  // the work that comes first
  bool is_begun = false;                                // work on the device may use its memory
  std::shared_ptr<const CudaMark> after;  // the result is in device memory; set when the operation has completed
  std::vector<PinnedBuffer> copies;       // in use until `after` has passed
  DeviceMemory result;                    // NCCL's, where the caller gave no memory; goes back behind `after`

  /// Leaves the copies allocated until the process ends.
  void leak() {
    for (PinnedBuffer& copy : copies) copy.leak();
  }
};

}  // namespace farandole
