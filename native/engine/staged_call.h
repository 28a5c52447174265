#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "device/cuda_device.h"
#include "device/pinned_pool.h"
#include "engine/device_side.h"
#include "engine/operation.h"

namespace farandole {

class Staging;

/// The operations of one call, some of them on device memory, with copies in pinned host memory for the engine.
class StagedCall : public std::enable_shared_from_this<StagedCall> {
 public:
  using Mark = std::shared_ptr<const CudaMark>;

  [[nodiscard]] size_t size() const { return members_.size(); }
  [[nodiscard]] const OperationPtr& operation(size_t index) const { return members_[index].operation; }
  [[nodiscard]] bool is_on_device(size_t index) const { return members_[index].device != nullptr; }
  /// Returns whether the call holds the result: its size came from the plan, and the caller gave no memory for it.
  [[nodiscard]] bool has_result(size_t index) const { return !members_[index].has_output; }

  // Once the call is done:

  /// Makes later work in `stream` of `device` wait for the results. Throws Error (Invalid) if the stream is being
  /// captured into a CUDA graph.
  void hold(CudaDevice& device, CudaDevice::Stream stream) const;
  /// Returns whether the results are in device memory. Throws Error (Fabric) if a device has failed.
  [[nodiscard]] bool has_returned() const;
  /// Returns the devices of the results.
  [[nodiscard]] std::vector<CudaDevice*> devices() const;

 private:
  friend class Staging;
  struct Member {
    Staging* staging = nullptr;
    StagedCall* call = nullptr;
    OperationPtr operation;
    CudaDevice* device = nullptr;
    PinnedBuffer input;                // also the result of an operation that keeps the shape
    PinnedBuffer result;               // of an operation sized by the plan; NCCL's is in `side`
    std::shared_ptr<DeviceSide> side;  // submitted in device memory
    CudaDevice::Address from = 0, to = 0;
    bool has_output = false;       // at `to`
    bool is_copied = false;        // Staging::copy_result() has copied the result
    std::optional<Error> trouble;  // no memory for the result
    std::shared_ptr<void> keep;
  };

  /// Frees the memory, except results that were not copied yet. No copy may be under way. If a broken device leaves
  /// that unknown (`device_works` is false), the memory stays allocated until the process ends, as does that of an
  /// abandoned operation.
  void release(bool device_works);

  std::vector<Member> members_;
  std::vector<Mark> arrived_;    // the inputs are in host memory
  std::vector<Mark> returned_;   // the results are in device memory; valid when done
  std::atomic<size_t> left_{0};  // members that have not completed
  bool submitted_ = false;       // guarded by the mutex of Staging, as is the next
  bool done_ = false;
};

}  // namespace farandole
