#pragma once

#include <memory>
#include <vector>

#include "device/cuda_device.h"
#include "device/device_memory.h"
#include "device/pinned_pool.h"

namespace farandole {

/// State of an operation that was submitted with its tensor in device memory.
struct DeviceSide {
  DeviceSide() = default;
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;
  ~DeviceSide() {
    if (after) result.end_after(*after);
  }

  CudaDevice* device = nullptr;
  std::vector<std::shared_ptr<const CudaMark>> before;  // after the work that the operation depends on
  bool is_begun = false;                                // work on the device may use the operation's memory
  std::shared_ptr<const CudaMark> after;                // after the result; set when the operation has completed
  std::vector<PinnedBuffer> copies;                     // in use until `after` has passed
  DeviceMemory result;                                  // of NCCL, if the caller gave no memory; freed behind `after`

  /// Leaves the copies allocated until the process ends, because the device may still use them.
  void leak() {
    for (PinnedBuffer& copy : copies) copy.leak();
  }
};

}  // namespace farandole
