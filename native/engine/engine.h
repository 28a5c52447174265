#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/fork.h"
#include "engine/control_tree.h"
#include "engine/driver.h"
#include "engine/executor.h"
#include "engine/failure_detector.h"
#include "engine/operation.h"
#include "engine/pending.h"
#include "engine/recurring.h"
#include "engine/trace.h"
#include "engine/transfers.h"
#include "engine/wiring.h"

namespace farandole {

/// One rank's side of the collectives: takes operations, agrees with the other ranks on an order, runs them.
///
/// The engine joins five parts. The driver decides which thread makes progress; the control tree carries requests and
/// plans; the executor runs plans; the failure detector finds lost ranks;
/// transfers carry messages between two ranks. Once a rank is lost, every waiter, present
/// and future, gets the same error.
class Engine : private Work {
 public:
  using Tuned = farandole::Tuned;

  Engine(Wiring wiring, EngineOptions options);  // starts the thread
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Take operations, all or none; never blocks. With `wake` the engine's thread is woken, otherwise the caller is
  /// about to wait. Throws Error: Invalid (a name that is in flight), Closed, or the failure that ended the job.
  void submit(std::span<const OperationPtr> operations, bool wake);
  void submit(const OperationPtr& operation, bool wake) { submit({&operation, 1}, wake); }

  /// Start a transfer; blocks for no peer. Throws Error: Invalid (without links for messages, or no such peer), Closed,
  /// or the failure that ended the job.
  void post(const TransferPtr& transfer);

  /// Run operations to completion if all ranks are about to run the same ones now; return whether they have completed.
  /// If not, nothing has happened, and the caller submits them. `before_wait` is called at most once, before a wait
  /// longer than about a microsecond. Blocks for a few milliseconds at most if other ranks do not arrive.
  bool run_in_lane(Recurring& recurring, const std::function<void()>& before_wait);

  /// Drive until `operation` has completed or `limit` has passed; return whether it has completed. `operation->error`
  /// holds its error.
  bool wait(Operation& operation, std::chrono::nanoseconds limit);

  /// Return a buffer that the other ranks of the host can read, so that allreduces in place need no copy: see
  /// Arena::take. In a world of several hosts, ordinary memory. Valid while it is held, also after the engine.
  [[nodiscard]] std::shared_ptr<std::byte> shared_buffer(size_t bytes);

  /// Leave the other ranks, fail pending operations, and stop. Idempotent. Does nothing in a forked child.
  void shutdown();

  /// Throw the failure that has ended the job, if any. For threads that wait for ranks instead of an operation.
  void require_alive();

  /// Add `change` to the count of threads in a call that will return to the binding.
  void count_callers(int change) { callers_.fetch_add(change); }

  /// Wait after shutdown() for those threads, for at most a second.
  void wait_for_callers() const;

  /// Return whether this is a forked child. The engine's threads and connections are the parent's. Take no lock: a
  /// thread that is missing here may hold it.
  [[nodiscard]] bool is_forked() const { return fork_number() != fork_number_; }

  [[nodiscard]] EngineStats stats();

  /// Return the operations that some ranks requested longer ago than the stall limit and others have not. Known on rank
  /// 0 only, up to half a second late.
  [[nodiscard]] std::vector<Negotiator::Stall> stalls();

  /// Change the knobs of all ranks with a later plan; with `paced`, mark the steps from there on. Takes effect with the
  /// next operation. Throws Error (Invalid) for invalid knobs, and on other ranks than 0.
  void turn(const Knobs& knobs, bool paced);

  /// The engine's operations on device memory, and memory for copies of such tensors.
  [[nodiscard]] DeviceGroup& devices() { return executor_.devices(); }
  [[nodiscard]] const std::shared_ptr<PinnedPool>& pinned() const { return executor_.pinned(); }

  /// End operations on devices that cannot complete, because a rank is lost or NCCL has failed. Call it again and again
  /// while such operations are under way: nothing else ends them.
  void watch_devices() noexcept;

  [[nodiscard]] Tuned tuned() { return executor_.tuned(); }
  [[nodiscard]] Trace& trace() { return trace_; }
  [[nodiscard]] int rank() const { return wiring_.rank; }
  [[nodiscard]] int size() const { return wiring_.size; }

 private:
  bool progress() noexcept override;
  void check_peers() noexcept override;
  void arm_doorbell() noexcept override;
  template <class Step>
  bool poison_on_error(Step step) noexcept;
  bool drive_once();
  void require_own_process(const std::string& name) const;

  const uint32_t fork_number_ = fork_number();
  Wiring wiring_;
  const EngineOptions options_;
  Trace trace_;
  Pending pending_;
  ControlTree control_;
  Driver driver_;
  FailureDetector failures_;
  Executor executor_;
  std::unique_ptr<Transfers> transfers_;  // null: the wiring has no links for them
  std::mutex closing_;
  std::atomic<bool> closed_{false};
  std::atomic<int> callers_{0};
};

}  // namespace farandole
