#pragma once

#include <functional>
#include <memory>

#include "base/error.h"
#include "device/cuda_device.h"
#include "transport/guard.h"
#include "transport/nccl_library.h"

namespace farandole {

/// An NCCL communicator for the ranks of one engine, on one device.
///
/// NCCL has no deadlines and does not detect lost ranks: its kernels wait for ever. So the communicator is
/// non-blocking, and every wait checks a guard, which throws when a rank is lost or a deadline has passed. The
/// communicator is then aborted, which also ends its kernels on the device. The device is current in all calls, because
/// NCCL restores the thread's current device after a call. Without one that is the first GPU, on which a context would
/// be created.
class NcclComm {
 public:
  /// Creates the communicator. `id` comes from make_id() on one rank and is the same on all ranks. Blocks until all
  /// ranks have called it. Throws what the guard throws, or Error (Fabric). `before_abort` is called with the error
  /// that aborts the communicator, before the abort ends operations on the device.
  NcclComm(std::shared_ptr<const NcclLibrary> library, CudaDevice& device, const NcclLibrary::UniqueId& id, int rank,
           int size, Guard& guard, std::function<void(const Error&)> before_abort);
  /// Finalizes the communicator, unless it was aborted.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// Returns an id for a new communicator. `device` is that of a rank of the communicator.
  [[nodiscard]] static NcclLibrary::UniqueId make_id(const NcclLibrary& library, const CudaDevice& device);

  /// Runs `enqueue` as one NCCL group, and waits until its operations are in their streams. `enqueue` calls NCCL's
  /// operations with handle(), and returns the first code that is not a success. Throws what the guard throws, or Error
  /// (Fabric), after aborting the communicator.
  template <class Enqueue>
  void group(Enqueue enqueue) {
    require_alive();
    const CudaDevice::Current current(device_);
    require("ncclGroupStart", library_->group_start());
    const int code = enqueue();
    const int ended = library_->group_end();  // also after a failure, because the thread is still in the group
    require("an operation of NCCL", code);
    settle("ncclGroupEnd", ended);
  }

  /// Aborts the communicator and throws Error (Fabric) unless `code` means success or a call in progress.
  void require(const char* function, int code);
  /// Throws as require() does if an operation on the device has failed. For a thread that waits for operations.
  void check();
  /// Aborts the communicator because of `error`, which also ends its operations on the device. Idempotent.
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
