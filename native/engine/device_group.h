#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "collectives/world.h"
#include "device/cuda_device.h"
#include "engine/device_agreement.h"
#include "engine/operation.h"
#include "engine/plan.h"
#include "transport/guard.h"
#include "transport/nccl_comm.h"

namespace farandole {

/// Returns whether operations like `request` can go by NCCL. Depends on what is the same on all ranks.
[[nodiscard]] bool fits_nccl(Kind kind, DType dtype, const Reduction& reduction);

/// The operations of an engine on device memory: the ranks' choice between NCCL and host memory, and their
/// communicator.
///
/// The first operation that NCCL could run makes the ranks agree, in its place in the plan. Until then operations are
/// submitted in device memory. If NCCL is not chosen, these are copied to host memory when they run, and later ones
/// before they are submitted; see Staging.
class DeviceGroup {
 public:
  DeviceGroup(int rank, int size, GpuOptions options, Guard& guard);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  /// Any thread: return whether an operation is to be submitted with its tensor in the memory of `device`. Throws Error
  /// (Invalid) if the ranks use NCCL, and this one has worked on another device.
  [[nodiscard]] bool takes(const std::string& name, Kind kind, DType dtype, const Reduction& reduction,
                           CudaDevice& device);

  // With the driver's lock, for operations of a plan that run as one:

  struct Choice {
    bool by_nccl = false;
    std::optional<Error> refusal{};  // NCCL is demanded, and cannot be used
  };
  /// Return how they go, the same on all ranks. The first call makes the ranks agree, by `world`; it blocks until all
  /// ranks have called it. `has_joined`: a joined rank takes part. Until the ranks have agreed it may have no GPU.
  Choice choose(World& world, std::span<const OperationPtr> operations, bool has_joined);
  /// Enqueue them on the device, behind the work of their callers' streams. The first call makes the communicator, and
  /// blocks until all ranks have called it. Throws what the guard throws, or Error (Fabric).
  const char* run(World& world, const Bucket& bucket, std::span<const OperationPtr> operations);

  /// Any thread: abort the communicator if NCCL reports a failure, which it returns, or if a rank is `lost`. With
  /// `may_end` it has left in order, and the operations get a second to end. For a thread that looks after operations
  /// on the device.
  std::optional<Error> watch(const std::optional<Error>& lost, bool may_end) noexcept;
  /// End the communicator, when no operation of its ranks is under way on the device. Blocks for a second at most. With
  /// `forked`, leave it to the parent process.
  void close(bool forked) noexcept;
  /// Any thread: return why the communicator was aborted. Results on the device may be wrong since then.
  [[nodiscard]] std::optional<Error> failure();

 private:
  [[nodiscard]] DeviceCard card();
  void agree(World& world);
  void connect(World& world);
  void note(const Error& error) noexcept;

  const int rank_, size_;
  const GpuOptions options_;
  Guard& guard_;

  std::mutex mu_;  // guards the members below, up to comm_mu_
  CudaDevice* device_ = nullptr;
  std::shared_ptr<const NcclLibrary> library_;
  std::string why_not_;  // this rank cannot use NCCL
  bool told_ = false;    // the others know this rank's card
  std::optional<Error> failure_;
  std::optional<DeviceDecision> decision_;  // changed with the driver's lock only

  std::mutex comm_mu_;  // guards the members below
  std::unique_ptr<NcclComm> comm_;
  CudaDevice::Stream stream_ = nullptr;
};

}  // namespace farandole
