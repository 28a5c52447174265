#include "engine/engine.h"

#include <utility>

#include "base/clock.h"
#include "base/ticks.h"

namespace farandole {
namespace {

constexpr uint64_t kShutdownLimit = 1'000'000'000;  // ns; limit for operations and messages under way at shutdown

Wiring valid(Wiring wiring) {
  wiring.validate();
  return wiring;
}

}  // namespace

Engine::Engine(Wiring wiring, EngineOptions options)
    : wiring_(valid(std::move(wiring))),
      options_(options.fitted_to(wiring_)),
      control_(wiring_, options_, pending_, trace_),
      driver_(wiring_, options_.spin, control_.has_remote_peers(), pending_, *this),
      failures_(wiring_, options_, pending_, control_, driver_),
      executor_(wiring_, options_, pending_, trace_, driver_, failures_) {
  if (wiring_.segment->has_transfer_rings())
    transfers_ = std::make_unique<Transfers>(wiring_, options_.timeout, pending_, driver_, failures_);
  driver_.start();
}

Engine::~Engine() {
  shutdown();
  if (!is_forked()) return;
  executor_.devices().close(true);
  driver_.abandon();
  control_.abandon();
  if (transfers_) transfers_->abandon();
}

void Engine::require_own_process(const std::string& name) const {
  if (is_forked())
    throw Error::invalid(name,
                         "this process was forked from a rank after its start, and only the rank itself can run "
                         "collectives; fork before init(), or start this process by spawn");
}

void Engine::submit(std::span<const OperationPtr> operations, bool wake) {
  require_own_process(operations.front()->request.name);
  const uint64_t now = now_ns();
  const uint64_t now_ticks = ticks();
  for (const OperationPtr& operation : operations) {
    operation->submitted_ns = now;
    operation->submitted_ticks = now_ticks;
  }
  pending_.add(operations);
  // A joined rank never arrives in the lane, so the other ranks must not wait there.
  if (operations.front()->request.kind == Kind::Join) wiring_.segment->lane().suspend();
  if (wake) driver_.wake(now);
}

void Engine::post(const TransferPtr& transfer) {
  require_own_process(transfer->request.name);
  if (!transfers_) throw Error::invalid(transfer->request.name, "this engine has no links for messages");
  transfer->submitted_ns = now_ns();
  transfers_->post(transfer);
  // Most messages that fit into the link are sent here and now, and those that have arrived received.
  if (const Driver::Lock driving = driver_.try_lock(); driving && !failures_.has_failed() && !driver_.is_stopping())
    poison_on_error([this] { return transfers_->progress(); });
  driver_.notify_waiters();
  if (!transfer->done()) driver_.wake(transfer->submitted_ns);
}

bool Engine::wait(Operation& operation, std::chrono::nanoseconds limit) {
  if (operation.done()) return true;
  require_own_process(operation.request.name);
  return driver_.wait(operation, limit);
}

bool Engine::run_in_lane(Recurring& recurring, const std::function<void()>& before_wait) {
  require_own_process(recurring.operations.front()->request.name);
  // New knobs need a plan.
  if (!executor_.can_run_in_lane(recurring) || control_.is_turning()) return false;
  {
    const Driver::Lock driving = driver_.try_lock();
    // Pending operations run first, on every rank, so all ranks in the lane have run the same plans.
    if (!driving || failures_.has_failed() || closed_.load() || !pending_.empty() || control_.has_plans()) return false;
    if (!executor_.run_in_lane(recurring, before_wait)) return false;
  }
  driver_.notify_waiters();
  return true;
}

bool Engine::drive_once() {
  if (failures_.has_failed() || driver_.is_stopping()) {
    control_.flush();  // the announcement may still wait for room
    return false;
  }
  if (const auto failure = executor_.devices().failure()) throw failures_.root_cause(*failure);
  bool moved = control_.send_requests();
  if (moved) executor_.leave_lane();
  moved = control_.receive() || moved;
  moved = control_.decide() || moved;
  if (transfers_) moved = transfers_->progress() || moved;
  control_.forward();
  while (const auto agreed = control_.next_plan()) {
    executor_.run(*agreed);
    moved = true;
  }
  control_.flush();
  return moved;
}

/// Return the result of `step`. An error ends the job, and counts as progress.
template <class Step>
bool Engine::poison_on_error(Step step) noexcept {
  try {
    return step();
  } catch (const Error& error) {
    failures_.poison(error);
  } catch (const std::exception& error) {
    failures_.poison(Error::internal(error.what()));
  }
  return true;
}

bool Engine::progress() noexcept {
  return poison_on_error([this] { return drive_once(); });
}

void Engine::check_peers() noexcept {
  const auto drive_until_idle = [this] {
    while (drive_once()) {
    }
  };
  poison_on_error([&] {
    if (transfers_) transfers_->check_overdue();
    const std::optional<Error> lost = failures_.find_lost();
    // First receive the messages that a departed or lost rank sent before. Only operations still pending afterwards
    // fail.
    if (control_.has_departures()) {
      drive_until_idle();
      control_.announce_departures();
    }
    if (!lost) return false;
    drive_until_idle();
    // A rank with connections to other hosts reports losses even when it is idle.
    if (!pending_.empty() || control_.has_remote_peers()) throw *lost;
    return false;
  });
}

void Engine::arm_doorbell() noexcept {
  poison_on_error([this] {
    control_.arm_doorbell();
    if (transfers_) transfers_->arm_doorbell();
    return false;
  });
}

std::shared_ptr<std::byte> Engine::shared_buffer(size_t bytes) {
  require_own_process("empty_shared");
  if (closed_.load()) throw Error::closed("it was shut down");
  return executor_.shared_buffer(bytes);
}

void Engine::require_alive() {
  require_own_process("require_alive");
  failures_.require_alive();
}

void Engine::shutdown() {
  if (is_forked()) return;
  {
    const std::lock_guard closing(closing_);  // a second caller returns when the first has finished
    if (closed_.exchange(true)) return;
    pending_.refuse(wiring_.in_job_ranks(Error::closed("it was shut down")));
    // An agreed operation may still be running, and the other ranks need this rank's part in it.
    const uint64_t until = now_ns() + kShutdownLimit;
    Driver::Lock driving = driver_.take_over(until);
    if (progress()) progress();
    failures_.fail_pending(Error::closed("it was shut down while this operation was pending"));
    // After a failure, announce the failure instead of a clean departure.
    control_.leave(!failures_.has_failed(), until);
    driver_.stop(std::move(driving));
    for (int rank = 0; rank < wiring_.segment->ranks(); ++rank) wiring_.segment->area(rank).doorbell.bump();
    control_.stop_watching();
    if (transfers_) transfers_->stop_watching();
    executor_.close();
  }
  driver_.report();
}

void Engine::wait_for_callers() const {
  if (is_forked()) return;  // the threads are the parent's
  const uint64_t until = now_ns() + kShutdownLimit;
  while (callers_.load() > 0 && now_ns() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Engine::turn(const Knobs& knobs, bool paced) {
  require_own_process("turn");
  control_.turn(knobs, paced);
}

void Engine::watch_devices() noexcept {
  std::optional<Error> lost;
  try {
    failures_.require_alive();
  } catch (const Error& error) {
    lost = error;
  }
  // The other ranks do not know of a failure that only NCCL has reported, so drive to announce it.
  if (!executor_.devices().watch(lost, lost && failures_.has_left(*lost))) return;
  driver_.wake(now_ns());
  if (const Driver::Lock driving = driver_.try_lock()) progress();
  driver_.notify_waiters();
}

std::vector<Negotiator::Stall> Engine::stalls() {
  if (closed_.load() || failures_.has_failed()) return {};
  return control_.stalls();
}

EngineStats Engine::stats() {
  EngineStats stats = executor_.stats();
  const ControlTree::RequestCounts counts = control_.request_counts();
  stats.asked_by_number = counts.by_number;
  stats.asked_in_full = counts.in_full;
  stats.waited_ns += driver_.waited_ns();
  return stats;
}

}  // namespace farandole
