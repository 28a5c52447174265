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
  /// The operation waits for the work that is in these streams: that of the input's producer, and that of the output's
  /// last users. The second is not used without an output.
  CudaDevice::Stream input_stream = nullptr, output_stream = nullptr;
  std::string_view name;       // of an operation outside a group
  std::shared_ptr<void> keep;  // keeps the tensors alive
};

/// Operations on tensors in device memory: by NCCL, or through pinned host memory.
///
/// Operations that NCCL can run, as far as DeviceGroup knows, are submitted at once, and run behind the work in the
/// caller's stream. For the others, start() enqueues copies of the inputs in a separate stream of the device, behind
/// the work in the caller's stream. A thread submits an operation once its copy is complete. When an operation
/// completes, its result is copied back in another stream. So copies in both directions and collectives of different
/// operations overlap. Neither the calling thread nor its stream waits before the results are requested. Then the
/// stream waits for the copies, and the thread only for the collective.
class Staging {
 public:
  explicit Staging(std::shared_ptr<Engine> engine);
  ~Staging();  // shuts the engine down: operations under way refer to this object
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Starts `request` on each tensor: as members of a group, or each under its own name. Starts all or none. Does not
  /// wait for devices. Throws Error: what Engine::submit() throws, Invalid if a stream is being captured into a CUDA
  /// graph, or Fabric if a device fails.
  [[nodiscard]] std::shared_ptr<StagedCall> start(RequestView request, std::span<const StagedTensor> tensors);

  /// Waits until all operations of `call` have completed and their copies are in the device's stream, for `limit` at
  /// most; returns whether they have.
  bool wait(StagedCall& call, std::chrono::nanoseconds limit);
  [[nodiscard]] bool is_done(const StagedCall& call);  // throws Error (Invalid) in a forked child, as the waits do

  /// Waits until all calls that have been started are submitted to the engine, for `limit` at most; returns whether
  /// they are. Call it before an operation that must follow them, such as a join.
  bool wait_for_submissions(std::chrono::nanoseconds limit);

  /// Throws the failure that has ended operations on devices, if any, because their results are wrong.
  void require_results();

  /// Starts to copy a result that the call holds to device memory, in `stream`; works once. Throws Error (Invalid) if
  /// the result has been copied before, or `bytes` is not its size.
  CudaMark copy_result(StagedCall& call, size_t index, CudaDevice& device, CudaDevice::Address to, size_t bytes,
                       CudaDevice::Stream stream);

  /// Fails operations that were not submitted yet, and stops the thread. Call it after Engine::shutdown(). Idempotent;
  /// a second caller returns when the first has finished.
  void close();

 private:
  using Call = std::shared_ptr<StagedCall>;
  using Lock = std::unique_lock<std::mutex>;

  /// A call and memory to free once copies, or operations on devices, have passed the marks.
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
  void add(const Call& call);
  void withdraw(const Call& call, bool device_works);
  void require_open() const;
  void submit(const Call& call);
  void fail(const Call& call, const Error& error);
  void finish(StagedCall::Member& member) noexcept;
  void complete(const Call& call) noexcept;
  void drop_leaving() noexcept;
  void require_own_process() const;  // throws Error (Invalid) in a forked child

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<PinnedPool> pool_;

  std::mutex ending_;  // held by close()

  std::mutex mu_;  // guards the members below
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::deque<Call> arriving_;  // in the order of their copies
  std::deque<Leaving> leaving_;
  std::unordered_set<Call> under_way_;
  std::unordered_set<std::string> names_;  // of the operations under way
  bool closing_ = false;
  std::thread thread_;  // started by the first call
};

}  // namespace farandole
