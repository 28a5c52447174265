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

/// A bucket that ran, as input of Trace::add. Times are those of Trace::now().
struct TracedBucket {
  Kind kind;
  const char* algorithm;  // a literal
  uint64_t agreed;        // when this rank received the agreement; 0: not recorded
  uint64_t begun;
};

/// One phase of one operation, or the start of a plan. Times are those of now_ns().
struct TraceEvent {
  uint32_t name;      // in TraceBatch::names
  const char* phase;  // "negotiate", "queue", the operation's kind, or "plan"
  uint64_t begin_ns;
  uint64_t end_ns;
  const char* algorithm = nullptr;  // for an operation only
  uint64_t bytes = 0;
  uint64_t buckets = 0;  // for a plan only
};

/// The records of a trace between two drains. Names are its only strings, each stored once.
class TraceBatch {
 public:
  [[nodiscard]] const std::vector<std::string>& names() const { return names_; }

  /// The number of operations and plans, in order of completion.
  [[nodiscard]] size_t size() const { return records_.size(); }

  /// Calls `visit` with each phase of record `at`.
  template <class Visit>
  void visit_phases(size_t at, Visit visit) const {
    const Record& record = records_[at];
    if (record.bucket == kPlan) {
      const uint64_t begun = scale_.ns_of(record.asked);
      visit(TraceEvent{record.name, "plan", begun, begun, nullptr, 0, record.bytes});
      return;
    }
    const Bucket& bucket = buckets_[record.bucket];
    const uint64_t begun = scale_.ns_of(bucket.begun);
    uint64_t agreed = scale_.ns_of(bucket.agreed);
    if (begun < agreed + kAtOnce) agreed = begun;
    if (record.asked != 0) visit(TraceEvent{record.name, "negotiate", scale_.ns_of(record.asked), agreed});
    if (agreed < begun) visit(TraceEvent{record.name, "queue", agreed, begun});
    visit(TraceEvent{record.name, name_of(bucket.kind), begun, scale_.ns_of(bucket.ended), bucket.algorithm,
                     record.bytes});
  }

 private:
  friend class Trace;
  static constexpr uint32_t kPlan = 0xffffffff;
  static constexpr uint64_t kAtOnce =
      5000;  // ns; a shorter gap between a plan and its first bucket is not shown as a phase

  struct Bucket {
    uint64_t agreed, begun, ended;
    const char* algorithm;
    Kind kind;
  };
  struct Record {
    uint64_t asked;  // 0: unknown
    uint64_t bytes;  // of a plan: the number of its buckets
    uint32_t name;
    uint32_t bucket;  // in buckets_, or kPlan
  };

  std::vector<Record> records_;
  std::vector<Bucket> buckets_;
  std::vector<std::string> names_;
  TickScale scale_;
};

/// Recorded events since the last drain; nothing while off. Keeps at most a million operations and counts the rest.
class Trace {
 public:
  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool marks_plans() const { return marks_plans_.load(std::memory_order_relaxed); }

  /// The time for add(); 0 while off.
  [[nodiscard]] uint64_t now() const { return on() ? ticks() : 0; }

  /// Discards earlier records and records from now on; operations already under way begin now.
  void start(bool marks_plans);

  /// Stops recording; records can still be drained.
  void stop();

  /// Records that `operations` ran together until now. The phases before it begin at their `submitted_ticks`, if set.
  void add(const TracedBucket& bucket, std::span<const OperationPtr> operations);

  /// Records that a plan of `buckets` buckets begins now.
  void add_plan(size_t buckets);

  [[nodiscard]] TraceBatch drain();
  [[nodiscard]] uint64_t dropped();

 private:
  [[nodiscard]] uint32_t name_of(Operation& operation);
  [[nodiscard]] bool has_room();

  std::atomic<bool> on_{false};
  std::atomic<bool> marks_plans_{false};
  std::mutex mu_;
  TraceBatch taken_;
  uint64_t batch_ = 1;  // drains so far
  uint32_t plan_name_ = TraceBatch::kPlan;
  uint64_t dropped_ = 0;
  uint64_t since_ = 0;
  TickScale scale_;
};

}  // namespace farandole
