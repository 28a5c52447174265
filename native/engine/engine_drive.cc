#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/execute.h"
#include "engine/joined.h"

// How an engine makes progress: it talks to the others (engine_talk.cc) and runs what was decided.
namespace farandole {

bool Engine::progress() noexcept {
  try {
    return drive_once();
  } catch (const Error& error) {
    poison(error);
  } catch (const std::exception& error) {
    poison(Error::internal(error.what()));
  }
  return true;
}

bool Engine::drive_once() {
  if (failed_.load() || stop_.load()) {
    for (ControlStream& control : controls_) control.flush();  // the news of it may still wait for room
    return false;
  }
  bool moved = ask();
  moved = hear() || moved;
  if (leads()) moved = decide() || moved;
  else forward();
  while (!plans_.empty()) {
    const Agreed next = std::move(plans_.front());
    plans_.pop_front();
    run_plan(next.plan, next.at);
    moved = true;
  }
  for (ControlStream& control : controls_) control.flush();
  return moved;
}

void Engine::run_plan(const Plan& plan, uint64_t agreed) {
  if (trace_.marks_plans()) trace_.add_plan(plan.size());
  for (const auto& item : plan) {
    if (const auto* bucket = std::get_if<Bucket>(&item)) run_bucket(*bucket, agreed);
    else if (const auto* refusal = std::get_if<Refusal>(&item)) refuse(*refusal);
    else turn_to(std::get<Knobs>(item));
  }
}

void Engine::turn_to(const Knobs& knobs) {
  world_.turn(knobs);
  const std::lock_guard lock(stats_mu_);
  tuned_.knobs = knobs;
  ++tuned_.turns;
  pace_.restart();
  paces_ = leads() && pace_wanted_;
}

void Engine::run_bucket(const Bucket& bucket, uint64_t agreed) {
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
    for (const OperationPtr& operation : operations) fail(operation, error);
    throw;
  }
  if (bucket.kind == Kind::Join) wiring_.segment->lane().resume();
  run_operations(bucket, operations, agreed);
}

OperationPtr Engine::take(const Entry& entry) {
  if (!entry.request) return pending_.take(entry);
  // Some rank has joined, perhaps this one.
  OperationPtr own = pending_.take(entry.name);
  return own ? own : stand_in(*entry.request, wiring_.size);
}

void Engine::run_operations(const Bucket& bucket, std::span<const OperationPtr> operations, uint64_t agreed) {
  executed_ += static_cast<uint32_t>(operations.size());
  const uint64_t begin = now_ns();
  const uint64_t begun = trace_.now();
  operation_deadline_ns_ = options_.timeout.count() > 0 ? begin + static_cast<uint64_t>(options_.timeout.count()) : 0;
  std::optional<Error> error;
  const char* algorithm = "";
  try {
    algorithm = execute(world_, *results_, wiring_.rank, wiring_.size, bucket, operations);
  } catch (const Error& raised) {
    error = root_cause(raised);
  } catch (const std::exception& raised) {
    error = Error::internal(raised.what());
  }
  if (!error) {
    uint64_t bytes = 0;
    for (const OperationPtr& operation : operations) bytes += operation->request.bytes();
    count(operations, bytes);
    if (trace_.on()) trace_.add({bucket.kind, algorithm, agreed, begun}, operations);
  }
  for (const OperationPtr& operation : operations) {
    if (error) {
      fail(operation, *error);
    } else {
      conclude(operation);
    }
  }
  if (error) throw *error;
}

void Engine::count(std::span<const OperationPtr> operations, uint64_t bytes) {
  const std::lock_guard lock(stats_mu_);
  ++stats_.buckets;
  stats_.bytes += bytes;
  stats_.operations += operations.size();
  if (paces_) pace_.add(operations, now_ns(), stats_.bytes);
}

void Engine::refuse(const Refusal& refusal) {
  // Our own request was on its way when the coordinator gave up waiting for it: it counts as a new one there.
  const auto& late = refusal.error.ranks;
  if (refusal.error.kind == ErrorKind::Timeout && std::find(late.begin(), late.end(), wiring_.rank) != late.end())
    return;
  // A rank that a timeout was waiting for has nothing to fail.
  const OperationPtr operation = pending_.take(refusal.name);
  if (!operation) return;
  if (operation->request.kind == Kind::Join) wiring_.segment->lane().resume();
  fail(operation, refusal.error);
}

void Engine::fail(const OperationPtr& operation, const Error& error) {
  operation->error = told(error).named(operation->request.name);
  conclude(operation);
}

/// The operation is done. Its listener hears of it from the engine's thread, which holds no lock then: what it calls
/// may submit, or even wait for another operation.
void Engine::conclude(const OperationPtr& operation) {
  operation->keep.reset();
  operation->finish();
  if (operation->listener.done == nullptr) return;
  {
    const std::lock_guard lock(finished_mu_);
    finished_.push_back(operation);
  }
  if (has_finished_.exchange(true) || in_the_way_) return;
  work_.bump();
  doorbell().nudge();
}

/// Tells the listeners of what is done.
void Engine::report() noexcept {
  while (has_finished_.load()) {
    std::vector<OperationPtr> finished;
    {
      const std::lock_guard lock(finished_mu_);
      has_finished_.store(false);
      finished.swap(finished_);
    }
    for (const OperationPtr& operation : finished) operation->listener.done(operation->listener.cookie, *operation);
  }
}

}  // namespace farandole
