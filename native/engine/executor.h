#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "device/pinned_pool.h"
#include "engine/control_tree.h"
#include "engine/device_group.h"
#include "engine/driver.h"
#include "engine/failure_detector.h"
#include "engine/lane.h"
#include "engine/pace.h"
#include "engine/recurring.h"
#include "engine/trace.h"
#include "transport/arena.h"

namespace farandole {

struct EngineStats {
  uint64_t operations = 0;  // completed
  uint64_t buckets = 0;     // executed
  uint64_t bytes = 0;       // of the inputs
  uint64_t asked_by_number = 0;
  uint64_t asked_in_full = 0;
  uint64_t in_lane = 0;    // operations agreed in the lane, without the coordinator
  uint64_t waited_ns = 0;  // by threads that waited for operations, without waits below a microsecond
};

/// The knobs of a rank after `turns` changes; on rank 0 also the marked steps since the last change.
struct Tuned {
  Knobs knobs;
  uint64_t turns = 0;
  std::vector<Pace::Mark> marks;
};

/// Execution of plans, with its memory and counters.
///
/// All members need the driver's lock, except those marked "any thread".
class Executor {
 public:
  Executor(Wiring& wiring, const EngineOptions& options, Pending& pending, Trace& trace, Driver& driver,
           FailureDetector& failures);

  /// Run a plan. Throws an error that ends the job; an operation that fails alone keeps its error.
  void run(const AgreedPlan& agreed);

  /// Any thread: the operations on device memory.
  [[nodiscard]] DeviceGroup& devices() { return devices_; }
  [[nodiscard]] const std::shared_ptr<PinnedPool>& pinned() const { return pinned_; }

  /// Any thread: return whether the ranks of this host may run `recurring` without the coordinator.
  [[nodiscard]] bool can_run_in_lane(const Recurring& recurring) const;

  /// Run `recurring` to completion if all ranks arrive for it now; return whether they did. No operation may be
  /// pending. `before_wait` is called at most once, before a wait longer than about a microsecond.
  bool run_in_lane(Recurring& recurring, const std::function<void()>& before_wait);

  void leave_lane();  // release ranks that wait in the lane, because this rank asks the coordinator

  // Any thread.
  [[nodiscard]] std::shared_ptr<std::byte> shared_buffer(size_t bytes);  // see Engine::shared_buffer()
  void close() { results_->close(); }                                    // stop keeping results for reuse
  [[nodiscard]] EngineStats stats();                                     // the counters of this part
  [[nodiscard]] Tuned tuned();

 private:
  void run(const Bucket& bucket, uint64_t agreed);
  void run(const Bucket& bucket, std::span<const OperationPtr> operations, uint64_t agreed);
  [[nodiscard]] const char* run_in_host_memory(const Bucket& bucket, std::span<const OperationPtr> operations);
  [[nodiscard]] std::vector<OperationPtr> take(const Bucket& bucket);
  [[nodiscard]] OperationPtr take(const Entry& entry);
  void refuse(const Refusal& refusal);
  void turn_to(const Knobs& knobs, bool paced);
  void run_all(const Recurring& recurring);
  void finish_in_lane(const Recurring& recurring, size_t payload);
  void count(std::span<const OperationPtr> operations, uint64_t bytes);

  const Wiring& wiring_;
  Pending& pending_;
  Trace& trace_;
  Driver& driver_;
  FailureDetector& failures_;
  std::shared_ptr<ResultPool> results_;
  std::shared_ptr<Arena> arena_;  // in a world of one host
  std::optional<Lane> lane_;      // in a world of one host with a core for every rank
  std::unique_ptr<World> world_;
  std::shared_ptr<PinnedPool> pinned_;  // for tensors on devices
  DeviceGroup devices_;
  uint32_t executed_ = 0;  // operations so far; equal on all ranks between two operations
  std::atomic<uint64_t> agreed_in_lane_{0}, operations_{0}, buckets_{0}, bytes_{0};  // as in EngineStats
  bool paced_ = false;                                                               // steps are marked

  std::mutex mu_;  // guards the members below
  Tuned tuned_;    // without marks
  Pace pace_;
};

}  // namespace farandole
