#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/ticks.h"
#include "engine/operation.h"

namespace farandole {

/// What the timeline shows: one phase of one operation, or a plan that begins. Times are those of now_ns().
struct TraceEvent {
  std::string name;
  const char* phase;
  uint64_t begin_ns;
  uint64_t end_ns;
  uint64_t bytes;
};

/// Events since the last drain; nothing while off. Keeps at most a million operations and counts the rest.
///
/// What is added is small and has no strings: an operation that recurs is named once per drain.
class Trace {
 public:
  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool marks_plans() const { return marks_plans_.load(std::memory_order_relaxed); }

  /// The present as add() takes it; 0 while off.
  [[nodiscard]] uint64_t now() const { return on() ? ticks() : 0; }

  /// Forgets what came before, and takes events from now on: what has begun earlier begins now.
  void start(bool marks_plans);

  /// Takes no more; what was taken can still be drained.
  void stop();

  /// `operations` ran together from `begun` to now. What each waited for before is shown from its `submitted_ticks` on,
  /// if there are any.
  void add(Kind kind, std::span<const OperationPtr> operations, uint64_t begun);

  /// A plan of so many bundles begins now.
  void add_plan(size_t bundles);

  [[nodiscard]] std::vector<TraceEvent> drain();
  [[nodiscard]] uint64_t dropped();

 private:
  struct Record {
    uint64_t asked;  // 0: unknown
    uint64_t begun, ended;
    uint64_t bytes;  // of a plan: its bundles
    uint32_t name;   // in names_, or kPlan
    Kind kind;
  };

  [[nodiscard]] uint32_t name_of(Operation& operation);
  [[nodiscard]] bool has_room();

  std::atomic<bool> on_{false};
  std::atomic<bool> marks_plans_{false};
  std::mutex mu_;
  std::vector<Record> records_;
  std::vector<std::string> names_;
  uint64_t batch_ = 1;  // counts the drains
  uint64_t dropped_ = 0;
  uint64_t since_ = 0;
  TickScale scale_;
};

}  // namespace farandole
