#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "device/cuda_device.h"
#include "device/pinned_pool.h"
#include "engine/engine.h"
#include "engine/staged_call.h"

namespace farandole {

/// One tensor of a call on device memory. Tensors in host memory may be among them.
struct StagedTensor {
  TensorView view;               // addresses of device memory, or of host memory
  CudaDevice* device = nullptr;  // null: host memory
  /// The work in these streams comes before the operation: that of the input's producer, and that of the output's last
  /// users. Without an output the second is not used.
  CudaDevice::Stream input_stream = nullptr, output_stream = nullptr;
  std::string_view name;       // of an operation that is no member of a group
  std::shared_ptr<void> keep;  // keeps the tensors alive
};

/// Runs operations on tensors in device memory: by NCCL, or through pinned host memory, where the engine works.
///
/// Operations that NCCL can run, as far as known (DeviceGroup), are submitted at once, and run behind the work in the
/// caller's stream. For the others,
/// inputs are copied in a stream of the device after the work in the caller's stream. A thread submits the operations
/// once the copies are there. Their results are copied back as each one completes, in another stream. So copies in both
/// directions and the engine's work of different operations overlap. Neither the calling thread nor its stream waits
/// before the results are asked for; the stream then waits for the copies, and the thread does not.
class Staging {
 public:
  explicit Staging(std::shared_ptr<Engine> engine);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Starts `request` on each tensor: as members of a group, or each under its own name. All are started or none. Does
  /// not wait for devices. Throws Error: what Engine::submit() throws, Invalid if the work of a stream is captured, or
  /// Fabric if a device fails.
  [[nodiscard]] std::shared_ptr<StagedCall> start(RequestView request, std::span<const StagedTensor> tensors);

  /// Waits until all operations of `call` have completed and their copies are in the device's stream, for `limit` at
  /// most; returns whether they have.
  bool wait(StagedCall& call, std::chrono::nanoseconds limit);
  [[nodiscard]] bool is_done(const StagedCall& call);  // throws Error (Invalid) in a forked child, as the waits do

  /// Waits until the calls that have been started are submitted to the engine, for `limit` at most; returns whether
  /// they are. An operation that must come after them, such as a join, waits for this.
  bool wait_for_submissions(std::chrono::nanoseconds limit);

  /// Throws the failure that has ended operations on devices, if any: their results are wrong.
  void require_results();

  /// Copies a result whose size came from the plan to device memory, once, in `stream`. Throws Error (Invalid) if it
  /// has been copied, or `bytes` is not its size.
  CudaMark copy_result(StagedCall& call, size_t index, CudaDevice& device, CudaDevice::Address to, size_t bytes,
                       CudaDevice::Stream stream);

  /// Fails what the engine does not have yet, and stops. Call it after Engine::shutdown(). Idempotent.
  void close();

 private:
  using Call = std::shared_ptr<StagedCall>;
  using Lock = std::unique_lock<std::mutex>;

  /// Marks, a call and memory that are dropped once their copies, or their operations on devices, are complete.
  struct Leaving {
    std::vector<StagedCall::Mark> marks;
    Call call;
    PinnedBuffer buffer;
  };

  void prepare(StagedCall::Member& member, RequestView request, const StagedTensor& tensor, size_t index, size_t count);
  bool prepare_side(StagedCall::Member& member, const RequestView& request, const StagedTensor& tensor);
  void claim_names(const StagedCall& call);
  void enqueue(StagedCall& call, std::span<const StagedTensor> tensors);
  void run() noexcept;
  bool advance(Lock& lock);
  void submit(const Call& call);
  void submit_at_once(const Call& call);
  void fail(const Call& call, const Error& error);
  void finish(StagedCall::Member& member) noexcept;
  void complete(const Call& call) noexcept;
  void drop_leaving() noexcept;
  void require_own_process() const;  // throws Error (Invalid) in a forked child

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<PinnedPool> pool_;

  std::mutex mu_;  // guards the members below
  std::condition_variable changed_;
  std::deque<Call> arriving_;  // in the order of their copies
  std::deque<Leaving> leaving_;
  std::unordered_set<Call> under_way_;
  std::unordered_set<std::string> names_;  // of the operations under way
  bool closing_ = false;
  std::thread thread_;  // since the first call
};

}  // namespace farandole
