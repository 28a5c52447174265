#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/world.h"
#include "device/cuda_device.h"
#include "engine/device_agreement.h"
#include "engine/operation.h"
#include "engine/plan.h"
#include "transport/guard.h"
#include "transport/nccl_comm.h"

namespace farandole {

/// Returns whether NCCL can run such an operation. Depends only on properties that are the same on all ranks.
[[nodiscard]] bool fits_nccl(Kind kind, DType dtype, const Reduction& reduction);

/// Operations of an engine on device memory: the ranks' choice between NCCL and host memory, and their communicator.
///
/// The ranks agree when the first operation that NCCL could run has its turn in the plan. Operations before that are
/// submitted with their tensors in device memory. If the ranks do not choose NCCL, these are copied to host memory when
/// they run, and later ones before they are submitted; see Staging.
class DeviceGroup {
 public:
  /// `members` has the job's numbers of a process set's ranks.
  DeviceGroup(int rank, int size, std::vector<int> members, GpuOptions options, Guard& guard);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  /// Any thread: return whether to submit an operation with its tensor in the memory of `device`. Throws Error
  /// (Invalid) if the ranks use NCCL, and this rank uses it on another device.
  [[nodiscard]] bool takes(const std::string& name, Kind kind, DType dtype, const Reduction& reduction,
                           CudaDevice& device);

  // With the driver's lock, for operations of a plan that run as one:

  struct Choice {
    bool by_nccl = false;
    std::optional<Error> refusal{};  // NCCL is required, but cannot be used
  };
  /// Return how to run the operations; the same on all ranks. In the first call the ranks agree over `world`, which
  /// blocks until all of them have called it. With `has_joined` a joined rank takes part; it may have no GPU, so the
  /// ranks do not agree then.
  Choice choose(World& world, std::span<const OperationPtr> operations, bool has_joined);
  /// Enqueue the operations on the device, behind the work of their callers' streams. The first call creates the
  /// communicator, and blocks until all ranks have called it. Throws what the guard throws, or Error (Fabric).
  const char* run(World& world, const Bucket& bucket, std::span<const OperationPtr> operations);

  /// Any thread: abort the communicator if NCCL reports a failure, or if a rank is `lost`. Return NCCL's failure, if
  /// any. With `may_end` the lost rank has left in order, and the operations get a second to complete. For a thread
  /// that watches operations on the device.
  std::optional<Error> watch(const std::optional<Error>& lost, bool may_end) noexcept;
  /// Destroy the communicator. Call it when no operation of its ranks is under way on the device. Blocks for a second
  /// at most. With `forked`, release it without a call of NCCL, because the parent process owns it.
  void close(bool forked) noexcept;
  /// Any thread: return why the communicator was aborted, if it was. Results on the device may then be wrong.
  [[nodiscard]] std::optional<Error> failure();

 private:
  [[nodiscard]] DeviceCard card();
  void agree(World& world);
  void connect(World& world);
  void note(const Error& error) noexcept;

  const int rank_, size_;
  const std::vector<int> members_;
  const GpuOptions options_;
  Guard& guard_;

  std::mutex mu_;  // guards the members below, up to comm_mu_
  CudaDevice* device_ = nullptr;
  std::shared_ptr<const NcclLibrary> library_;
  std::string why_not_;  // why this rank cannot use NCCL; empty if it can
  bool told_ = false;    // this rank's card has been sent
  std::optional<Error> failure_;
  std::optional<DeviceDecision> decision_;  // changed with the driver's lock only

  std::mutex comm_mu_;  // guards the members below
  std::unique_ptr<NcclComm> comm_;
  CudaDevice::Stream stream_ = nullptr;
};

}  // namespace farandole
