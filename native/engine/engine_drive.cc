#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/execute.h"

// How an engine makes progress: it asks, hears, decides (rank 0) and runs what was decided.
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
  if (failed_.load() || stop_.load()) return false;
  bool moved = ask();
  moved = hear() || moved;
  if (wiring_.rank == 0) moved = decide() || moved;
  while (!plans_.empty()) {
    Plan plan = std::move(plans_.front());
    plans_.pop_front();
    run_plan(std::move(plan));
    moved = true;
  }
  for (ControlStream& control : controls_) control.flush();
  return moved;
}

bool Engine::ask() {
  Asking asking = pending_.drain();
  if (asking.empty()) return false;
  {
    const std::lock_guard lock(stats_mu_);
    for (const auto& item : asking) ++(item.index() == 0 ? stats_.asked_by_number : stats_.asked_in_full);
  }
  if (lane_) lane_->pass();
  if (wiring_.rank == 0) heed(0, std::move(asking));
  else controls_[0].send(asking);
  return true;
}

bool Engine::hear() {
  bool moved = false;
  for (ControlStream& control : controls_) {
    while (auto message = control.receive()) {
      heed(control.peer(), std::move(*message));
      moved = true;
    }
  }
  return moved;
}

void Engine::heed(int peer, Message message) {
  if (auto* asking = std::get_if<Asking>(&message)) {
    const double now = seconds_of(now_ns());
    for (auto& item : *asking) {
      if (const auto* id = std::get_if<uint32_t>(&item)) negotiator_.ask(peer, *id, now);
      else negotiator_.ask(peer, std::move(std::get<Request>(item)), now);
    }
  } else if (auto* plan = std::get_if<Plan>(&message)) {
    plans_.push_back(std::move(*plan));
  } else {
    const auto& farewell = std::get<Farewell>(message);
    if (!farewell.clean) throw Error::peer_lost("", farewell.rank, farewell.reason);
    if (farewell.rank < 0 || farewell.rank >= wiring_.size) throw Error::internal("an unknown rank has left");
    // The coordinator may go only because another rank went before it, and names that one.
    left_[static_cast<size_t>(peer)] = true;
    first_left_ = farewell.rank;
  }
}

bool Engine::decide() {
  Plan plan = negotiator_.decide(seconds_of(now_ns()));
  if (plan.empty()) return false;
  for (ControlStream& control : controls_) control.send(plan);
  plans_.push_back(std::move(plan));
  return true;
}

void Engine::run_plan(Plan plan) {
  for (const auto& item : plan) {
    if (const auto* bundle = std::get_if<Bundle>(&item)) run_bundle(*bundle);
    else refuse(std::get<Refusal>(item));
  }
}

void Engine::run_bundle(const Bundle& bundle) {
  std::vector<OperationPtr> operations;
  operations.reserve(bundle.entries.size());
  try {
    for (const Entry& entry : bundle.entries) operations.push_back(pending_.take(entry));
  } catch (const Error& error) {
    for (const OperationPtr& operation : operations) fail(operation, error);
    throw;
  }
  run_operations(bundle, operations);
}

void Engine::run_operations(const Bundle& bundle, std::span<const OperationPtr> operations) {
  executed_ += static_cast<uint32_t>(operations.size());
  const uint64_t begin = now_ns();
  operation_deadline_ns_ = options_.timeout.count() > 0 ? begin + static_cast<uint64_t>(options_.timeout.count()) : 0;
  std::optional<Error> error;
  try {
    execute(world_, wiring_.rank, wiring_.size, bundle, operations);
  } catch (const Error& raised) {
    error = root_cause(raised);
  } catch (const std::exception& raised) {
    error = Error::internal(raised.what());
  }
  if (!error) record(bundle, operations, begin);
  for (const OperationPtr& operation : operations) {
    if (error) {
      fail(operation, *error);
    } else {
      operation->keep.reset();
      operation->finish();
    }
  }
  if (error) throw *error;
}

void Engine::record(const Bundle& bundle, std::span<const OperationPtr> operations, uint64_t begin_ns) {
  uint64_t bytes = 0;
  for (const OperationPtr& operation : operations) bytes += operation->request.bytes();
  {
    const std::lock_guard lock(stats_mu_);
    ++stats_.bundles;
    stats_.bytes += bytes;
    stats_.operations += operations.size();
  }
  if (!trace_.on()) return;
  const uint64_t end = now_ns();
  for (const OperationPtr& operation : operations) {
    trace_.add({operation->request.name, "negotiate", operation->submitted_ns, begin_ns, 0});
    trace_.add({operation->request.name, name_of(bundle.kind), begin_ns, end, operation->request.bytes()});
  }
}

void Engine::refuse(const Refusal& refusal) {
  // Our own request was on its way when the coordinator gave up waiting for it: it counts as a new one there.
  const auto& late = refusal.error.ranks;
  if (refusal.error.kind == ErrorKind::Timeout && std::find(late.begin(), late.end(), wiring_.rank) != late.end())
    return;
  // A rank that a timeout was waiting for has nothing to fail.
  if (const OperationPtr operation = pending_.take(refusal.name)) fail(operation, refusal.error);
}

void Engine::fail(const OperationPtr& operation, const Error& error) {
  operation->error = error.named(operation->request.name);
  operation->keep.reset();
  operation->finish();
}

}  // namespace farandole
