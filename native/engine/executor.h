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

#include "engine/control_tree.h"
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
  uint64_t in_lane = 0;    // operations that were agreed without the coordinator
  uint64_t waited_ns = 0;  // by threads that waited for operations, except for moments
};

/// The knobs that a rank works with after `turns` turns; on rank 0 also the marked steps since the last turn.
struct Tuned {
  Knobs knobs;
  uint64_t turns = 0;
  std::vector<Pace::Mark> marks;
};

/// Execution of plans, and the memory and counters that go with it.
///
/// All members need the driver's lock, except those marked "any thread".
class Executor {
 public:
  Executor(Wiring& wiring, const EngineOptions& options, Pending& pending, Trace& trace, Driver& driver,
           FailureDetector& failures);

  /// Run a plan. Throws what ends the job; operations that fail alone keep their errors.
  void run(const AgreedPlan& agreed);

  /// Any thread: return whether the ranks of this host may run `recurring` without the coordinator.
  [[nodiscard]] bool can_run_in_lane(const Recurring& recurring) const;

  /// Run `recurring` to its end if all ranks arrive for it now; return whether they did. Nothing may be pending.
  /// `settle` is called at most once, before a wait longer than a moment.
  bool run_in_lane(Recurring& recurring, const std::function<void()>& settle);

  void leave_lane();  // this rank asks the coordinator: ranks in the lane need not wait for it

  // For any thread.
  [[nodiscard]] std::shared_ptr<std::byte> shared_buffer(size_t bytes);  // see Engine::shared_buffer()
  void close() { results_->close(); }                                    // keep no more results for reuse
  [[nodiscard]] EngineStats stats();                                     // what this part counts
  [[nodiscard]] Tuned tuned();

 private:
  void run(const Bucket& bucket, uint64_t agreed);
  void run(const Bucket& bucket, std::span<const OperationPtr> operations, uint64_t agreed);
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
  uint32_t executed_ = 0;  // operations so far; the same on every rank between two of them
  std::atomic<uint64_t> agreed_in_lane_{0};

  std::mutex mu_;  // guards what follows
  EngineStats stats_;
  Tuned tuned_;  // without marks
  Pace pace_;
  bool paced_ = false;  // steps are marked
};

}  // namespace farandole
