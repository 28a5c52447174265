#include "engine/executor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/int8_blocks.h"
#include "base/keep.h"
#include "engine/carried.h"
#include "engine/execute.h"
#include "engine/host_copies.h"
#include "engine/joined.h"

namespace farandole {
namespace {

constexpr size_t kKeptPinned = size_t{1} << 30;  // bytes of unused pinned memory kept for reuse

/// Adds to a counter that only the thread with the driver's lock changes: cheaper than an atomic addition.
void add_to(std::atomic<uint64_t>& counter, uint64_t more) {
  counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

std::unique_ptr<World> take_world(Wiring& wiring, FailureDetector& failures, std::chrono::nanoseconds spin) {
  WiredWorld made = connect_world(wiring, failures, spin);
  failures.watch(made);
  return std::move(made.world);
}

/// Return whether the lane may run operations like `recurring`. A rank that runs ahead must not reuse a round of the
/// lane that another rank still reads. So the lane takes only operations that no rank leaves before all have begun
/// them; those without bytes wait for no rank.
bool synchronizes(const Recurring& recurring, const World& world) {
  const Request& first = recurring.operations.front()->request;
  const KindTraits& traits = traits_of(first.kind);
  if (!traits.in_lane || (traits.has_root && !world.broadcasts_together())) return false;
  return !traits.has_tensor() || recurring.bytes > 0;
}

/// Return whether these are only some members of a group, which must run as a whole.
bool is_partial_group(const Recurring& recurring) {
  const Request& first = recurring.operations.front()->request;
  return first.group_size != (first.group.empty() ? 0 : recurring.operations.size());
}

}  // namespace

Executor::Executor(Wiring& wiring, const EngineOptions& options, Pending& pending, Trace& trace, Driver& driver,
                   FailureDetector& failures)
    : wiring_(wiring),
      pending_(pending),
      trace_(trace),
      driver_(driver),
      failures_(failures),
      results_(ResultPool::make(options.kept_results)),
      world_(take_world(wiring, failures, options.spin)),
      pinned_(PinnedPool::make(kKeptPinned)),
      devices_(wiring.rank, wiring.size, wiring.members, options.gpu, failures) {
  if (wiring.is_one_host()) {
    arena_ = Arena::make(wiring.segment, wiring.rank);
    lane_.emplace(*wiring.segment, wiring.rank, WaitPolicy{options.spin});
  }
  world_->turn(tuned_.knobs);
}

void Executor::run(const AgreedPlan& agreed) {
  if (trace_.marks_plans()) trace_.add_plan(agreed.plan.size());
  for (const auto& item : agreed.plan) {
    if (const auto* bucket = std::get_if<Bucket>(&item)) run(*bucket, agreed.received_at);
    else if (const auto* refusal = std::get_if<Refusal>(&item)) refuse(*refusal);
    else turn_to(std::get<Knobs>(item), agreed.paced);
  }
  if (lane_ && !pending_.empty()) lane_->keep_asking(executed_);
}

void Executor::run(const Bucket& bucket, uint64_t agreed) {
  const std::vector<OperationPtr> operations = take(bucket);
  if (bucket.kind == Kind::Join) wiring_.segment->lane().resume();
  run(bucket, operations, agreed);
}

std::vector<OperationPtr> Executor::take(const Bucket& bucket) {
  std::vector<OperationPtr> operations;
  operations.reserve(bucket.entries.size());
  try {
    for (const Entry& entry : bucket.entries) {
      if (entry.count == 1) {
        operations.push_back(take(entry));
        continue;
      }
      for (uint32_t i = 0; i < entry.count; ++i) operations.push_back(pending_.take(Entry{{}, entry.id + i, {}}));
    }
  } catch (const Error& error) {
    for (const OperationPtr& operation : operations) driver_.fail(operation, error);
    throw;
  }
  return operations;
}

OperationPtr Executor::take(const Entry& entry) {
  if (!entry.request) return pending_.take(entry);
  // A rank has joined, perhaps this one.
  OperationPtr own = pending_.take(entry.name);
  return own ? own : stand_in(*entry.request, wiring_.size);
}

void Executor::run(const Bucket& bucket, std::span<const OperationPtr> operations, uint64_t agreed) {
  executed_ += static_cast<uint32_t>(operations.size());
  const uint64_t begun = trace_.now();
  failures_.start_timeout(now_ns());
  std::optional<Error> error;
  const char* algorithm = "";
  try {
    const bool has_joined = !bucket.entries.empty() && bucket.entries[0].request.has_value();
    const DeviceGroup::Choice choice = devices_.choose(*world_, operations, has_joined);
    if (choice.refusal) {  // on all ranks
      for (const OperationPtr& each : operations) driver_.fail(each, choice.refusal->named(each->request.name));
      return;
    }
    if (has_results(bucket)) {
      store_results(bucket, operations);
      algorithm = "coordinator";
    } else {
      algorithm = choice.by_nccl ? devices_.run(*world_, bucket, operations) : run_in_host_memory(bucket, operations);
    }
  } catch (const Error& raised) {
    error = failures_.root_cause(raised);
  } catch (const std::exception& raised) {
    error = Error::internal(raised.what());
  }
  if (error) {
    for (const OperationPtr& operation : operations) {
      if (world_->has_abandoned()) {
        operation->is_abandoned = true;
        keep_for_ever(operation);
        keep_for_ever(operation->keep);
      }
      driver_.fail(operation, *error);
    }
    throw *error;
  }
  uint64_t bytes = 0;
  for (const OperationPtr& operation : operations) bytes += operation->request.bytes();
  count(operations, bytes);
  if (trace_.on()) trace_.add({bucket.kind, algorithm, agreed, begun}, operations);
  for (const OperationPtr& operation : operations) driver_.complete(operation);
}

const char* Executor::run_in_host_memory(const Bucket& bucket, std::span<const OperationPtr> operations) {
  HostCopies copies(*pinned_, operations, wiring_.rank, failures_);
  const char* algorithm = execute(*world_, *results_, wiring_.rank, wiring_.size, bucket, operations);
  copies.return_results();
  return algorithm;
}

void Executor::refuse(const Refusal& refusal) {
  // This rank's request was in flight when the coordinator's timeout expired; the coordinator counts it as a new one.
  const auto& late = refusal.error.ranks;
  if (refusal.error.kind == ErrorKind::Timeout && std::ranges::find(late, wiring_.rank) != late.end()) return;
  // A rank without the request has nothing to fail.
  const OperationPtr operation = pending_.take(refusal.name);
  if (!operation) return;
  if (operation->request.kind == Kind::Join) wiring_.segment->lane().resume();
  driver_.fail(operation, refusal.error);
}

void Executor::turn_to(const Knobs& knobs, bool paced) {
  world_->turn(knobs);
  const std::lock_guard lock(mu_);
  tuned_.knobs = knobs;
  ++tuned_.turns;
  pace_.restart();
  paced_ = paced;
}

void Executor::leave_lane() {
  if (lane_) lane_->leave(executed_);
}

bool Executor::can_run_in_lane(const Recurring& recurring) const {
  return lane_ && synchronizes(recurring, *world_) && !is_partial_group(recurring);
}

bool Executor::run_in_lane(Recurring& recurring, const std::function<void()>& before_wait) {
  LaneAttempt attempt;
  attempt.number = pending_.number_of(recurring);
  if (attempt.number == kNoId) return false;
  const Request& first = recurring.operations.front()->request;
  attempt.instance = executed_;
  // Other operations run as usual, only without the coordinator.
  if (recurring.bytes <= kSmallBytes && recurring.buckets.size() == 1 && is_elementwise(first.op))
    attempt.payload = recurring.bytes;
  const bool gives = !traits_of(first.kind).has_root || first.root == wiring_.rank;
  attempt.load = [&recurring, gives](std::byte* to) {
    for (size_t i = 0; gives && i < recurring.operations.size(); ++i) {
      const Operation& operation = *recurring.operations[i];
      const size_t bytes = operation.request.bytes();
      std::memcpy(to, operation.input, bytes);
      to += bytes;
    }
  };
  attempt.interrupted = [this] { return pending_.has_new(); };
  bool called = false;
  attempt.before_wait = [&] {
    called = true;
    before_wait();
  };
  const uint64_t now = trace_.now();
  for (const OperationPtr& operation : recurring.operations) operation->submitted_ticks = now;
  if (!lane_->agree(attempt)) return false;
  if (trace_.marks_plans()) trace_.add_plan(recurring.buckets.size());
  add_to(agreed_in_lane_, recurring.operations.size());
  if (attempt.payload > 0 || !traits_of(first.kind).has_tensor()) {
    finish_in_lane(recurring, attempt.payload);
  } else {
    if (!called) before_wait();
    run_all(recurring);
  }
  return true;
}

void Executor::run_all(const Recurring& recurring) {
  const std::span<const OperationPtr> all(recurring.operations);
  try {
    const uint64_t agreed = trace_.now();
    size_t from = 0;
    for (const size_t to : recurring.buckets) {
      run({all[from]->request.kind, {}}, all.subspan(from, to - from), agreed);
      from = to;
    }
  } catch (const Error& error) {
    failures_.poison(error);
    for (const OperationPtr& operation : all)
      if (!operation->done()) driver_.fail(operation, error);
  }
}

/// Complete operations whose data the ranks exchanged when they arrived in the lane.
void Executor::finish_in_lane(const Recurring& recurring, size_t payload) {
  const std::span<const OperationPtr> all(recurring.operations);
  const Request& first = all.front()->request;
  const uint64_t begun = trace_.now();
  const auto size = static_cast<size_t>(wiring_.size);
  std::array<const void*, 16> few{};
  std::vector<const void*> many(size > few.size() ? size : 0);
  const std::span<const void*> sources = many.empty() ? std::span(few).first(size) : std::span(many);
  size_t done = 0;
  for (size_t i = 0; payload > 0 && i < all.size(); ++i) {
    const size_t bytes = all[i]->request.bytes();
    if (traits_of(first.kind).has_root) {
      if (first.root != wiring_.rank || all[i]->output != all[i]->input)
        std::memcpy(all[i]->output, lane_->payload(first.root, payload) + done, bytes);
    } else {
      for (size_t rank = 0; rank < size; ++rank) sources[rank] = lane_->payload(static_cast<int>(rank), payload) + done;
      reduce(first.dtype, reduction_of(first, wiring_.size), all[i]->output, sources, bytes / size_of(first.dtype));
    }
    done += bytes;
  }
  executed_ += static_cast<uint32_t>(all.size());
  count(all, payload);
  if (trace_.on()) trace_.add({first.kind, "lane", begun, begun}, all);
  for (const OperationPtr& operation : all) driver_.complete(operation);
}

void Executor::count(std::span<const OperationPtr> operations, uint64_t bytes) {
  add_to(buckets_, 1);
  add_to(bytes_, bytes);
  add_to(operations_, operations.size());
  if (!paced_) return;
  const std::lock_guard lock(mu_);
  pace_.add(operations, now_ns(), bytes_.load(std::memory_order_relaxed));
}

std::shared_ptr<std::byte> Executor::shared_buffer(size_t bytes) {
  if (arena_) return arena_->take(bytes);
  const auto buffer = std::make_shared<ResultBuffer>(results_->take(bytes));
  return {buffer, buffer->data()};
}

EngineStats Executor::stats() {
  EngineStats stats;
  stats.operations = operations_.load(std::memory_order_relaxed);
  stats.buckets = buckets_.load(std::memory_order_relaxed);
  stats.bytes = bytes_.load(std::memory_order_relaxed);
  stats.in_lane = agreed_in_lane_.load(std::memory_order_relaxed);
  stats.waited_ns = lane_ ? lane_->waited_ns() : 0;
  return stats;
}

Tuned Executor::tuned() {
  const std::lock_guard lock(mu_);
  Tuned tuned = tuned_;
  tuned.marks = pace_.marks();
  return tuned;
}

}  // namespace farandole
