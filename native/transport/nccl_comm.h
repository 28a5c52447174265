#pragma once

#include <functional>
#include <memory>

#include "base/error.h"
#include "device/cuda_device.h"
#include "transport/guard.h"
#include "transport/nccl_library.h"

namespace farandole {

/// A communicator of NCCL for the ranks of one engine, on one device.
///
/// NCCL has no deadlines and no news of lost ranks: its kernels wait for ever. All calls are non-blocking here, and
/// every wait looks at a guard, so a lost rank or a deadline ends it. The communicator is then aborted, which also ends
/// the kernels that run on the device. The device is the current one in all calls: NCCL would make a context on
/// another GPU when it sets its own device and then the thread's again.
class NcclComm {
 public:
  /// Makes the communicator. `id` is the same on all ranks, from make_id() on one of them. Blocks until all ranks have
  /// called it. Throws what the guard throws, or Error (Fabric). `before_abort` gets the error that aborts the
  /// communicator, before operations on devices end by it.
  NcclComm(std::shared_ptr<const NcclLibrary> library, CudaDevice& device, const NcclLibrary::UniqueId& id, int rank,
           int size, Guard& guard, std::function<void(const Error&)> before_abort);
  /// Finalizes the communicator, unless it was aborted.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// Returns an id for a new communicator, of which one rank is on `device`.
  [[nodiscard]] static NcclLibrary::UniqueId make_id(const NcclLibrary& library, const CudaDevice& device);

  /// Runs `enqueue`, which calls NCCL's operations with handle() and returns the first code that is no success, as one
  /// group, and waits until they are in their streams. Throws what the guard throws, or Error (Fabric); the
  /// communicator is aborted then.
  template <class Enqueue>
  void group(Enqueue enqueue) {
    require_alive();
    const CudaDevice::Current current(device_);
    require("ncclGroupStart", library_->group_start());
    const int code = enqueue();
    const int ended = library_->group_end();  // also after a failure: the group belongs to the thread
    require("an operation of NCCL", code);
    settle("ncclGroupEnd", ended);
  }

  /// Throws Error (Fabric) unless `code` is a success or says that a call goes on.
  void require(const char* function, int code);
  /// Aborts the communicator if an operation on a device has failed. Throws as require() does. For a thread that waits.
  void check();
  /// Ends all operations, also on devices, because of `error`. Idempotent.
  void abort(const Error& error) noexcept;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] NcclLibrary::Comm handle() const { return comm_; }
  [[nodiscard]] const NcclLibrary& library() const { return *library_; }
  [[nodiscard]] bool is_aborted() const { return comm_ == nullptr; }

 private:
  void require_alive() const;
  void settle(const char* function, int code);
  template <class Call>
  void on_device(Call call) noexcept;

  const std::shared_ptr<const NcclLibrary> library_;
  CudaDevice& device_;
  const int rank_;
  Guard& guard_;
  const std::function<void(const Error&)> before_abort_;
  NcclLibrary::Comm comm_ = nullptr;
};

}  // namespace farandole
