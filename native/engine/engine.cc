#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "engine/execute.h"
#include "transport/shm_link.h"
#include "transport/tcp.h"

namespace farandole {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kNap{5};           // how long a sleeper that watches for lost peers sleeps at most
constexpr milliseconds kIdleNap{200};     // the same for a thread without work: it ticks for the negotiator
constexpr milliseconds kLastWords{1000};  // for what is under way when the engine shuts down
constexpr milliseconds kHearsay{100};     // for news that explain a broken connection
constexpr uint64_t kLookEvery = 64;

double seconds_of(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

const char* reason_of(Abort::Reason reason) {
  switch (reason) {
    case Abort::Reason::Died: return "its process was killed or crashed";
    case Abort::Reason::Left: return "it has shut down";
    case Abort::Reason::Unreachable: return "its connection broke";
    case Abort::Reason::Failed: return "it failed";
  }
  return "it failed";
}

/// What to tell the other ranks of this host about `error`.
Abort abort_of(const Error& error, int own_rank) {
  if (error.kind == ErrorKind::Closed) return {own_rank, Abort::Reason::Left};
  if (error.kind != ErrorKind::PeerLost) return {own_rank, Abort::Reason::Failed};
  for (const auto reason : {Abort::Reason::Died, Abort::Reason::Left, Abort::Reason::Failed})
    if (error.reason == reason_of(reason)) return {error.rank, reason};
  return {error.rank, Abort::Reason::Unreachable};
}

}  // namespace

Engine::Engine(Wiring wiring, EngineOptions options)
    : wiring_(std::move(wiring)),
      options_(options),
      trace_(options.trace),
      negotiator_({wiring_.size, options.fusion_threshold, options.cache_capacity, seconds_of(static_cast<uint64_t>(options.timeout.count()))}),
      world_(make_world()),
      left_(static_cast<size_t>(wiring_.size)),
      told_(static_cast<size_t>(wiring_.size)) {
  connect_control();
  thread_ = std::thread(&Engine::background, this);
  try {
    born_.get_future().get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

Engine::~Engine() { shutdown(); }

World Engine::make_world() {
  const auto& local = wiring_.local_ranks;
  local_rank_ = static_cast<int>(std::find(local.begin(), local.end(), wiring_.rank) - local.begin());
  if (local_rank_ == static_cast<int>(local.size()) || wiring_.segment->ranks() != static_cast<int>(local.size()) ||
      wiring_.segment->has_pair_rings() == wiring_.remotes.empty())
    throw Error::internal("the segment does not fit the ranks of this host");
  Guard& guard = *this;
  Patience patience{options_.spin};
  // More ranks than cores: whoever spins keeps the one it waits for from running.
  if (local.size() > std::thread::hardware_concurrency()) patience.spin = std::min<nanoseconds>(options_.spin, std::chrono::microseconds(2));
  else if (wiring_.remotes.empty()) lane_.emplace(*wiring_.segment, wiring_.rank, options_.spin);
  if (wiring_.remotes.empty()) return World(std::make_unique<SharedMesh>(wiring_.segment, wiring_.rank, guard, patience));

  std::vector<std::unique_ptr<Link>> links(static_cast<size_t>(wiring_.size));
  for (size_t i = 0; i < local.size(); ++i) {
    const auto peer = static_cast<int>(i);
    if (peer != local_rank_)
      links[static_cast<size_t>(local[i])] =
          std::make_unique<ShmLink>(local[i], wiring_.segment->area(peer), wiring_.segment->pair_ring(local_rank_, peer),
                                    wiring_.segment->pair_ring(peer, local_rank_), false);
  }
  for (const Wiring::Remote& remote : wiring_.remotes)
    links[static_cast<size_t>(remote.peer)] = std::make_unique<TcpLink>(remote.peer, remote.data_fd);
  return World(std::make_unique<Mesh>(wiring_.rank, std::move(links), guard, patience));
}

void Engine::connect_control() {
  const auto& local = wiring_.local_ranks;
  const bool leads = wiring_.rank == 0;
  const bool leader_is_local = local[0] == 0;
  for (size_t i = 0; leader_is_local && i < local.size(); ++i) {
    const auto peer = static_cast<int>(i);
    if (peer == local_rank_ || (!leads && peer != 0)) continue;
    controls_.emplace_back(std::make_unique<ShmLink>(local[i], wiring_.segment->area(peer),
                                                     wiring_.segment->control_ring(local_rank_, peer),
                                                     wiring_.segment->control_ring(peer, local_rank_), true));
  }
  std::vector<int> fds;
  for (const Wiring::Remote& remote : wiring_.remotes) {
    if (remote.control_fd < 0) continue;
    auto link = std::make_unique<TcpLink>(remote.peer, remote.control_fd);
    fds.push_back(link->fd());
    controls_.emplace_back(std::move(link));
  }
  if (fds.empty()) return;
  listens_always_ = true;
  doorman_ = std::make_unique<Doorman>(fds, doorbell());
}

void Engine::submit(const OperationPtr& operation, bool wake) {
  operation->submitted_ns = now_ns();
  pending_.add(operation);
  if (!wake) return;
  doorbell().bump();
  if (waiters_.load() == 0) work_.bump();
}

bool Engine::run_in_lane(const OperationPtr& operation) {
  const Request& request = operation->request;
  // Only what no rank can finish without all others: a rank that ran ahead could reuse a round that we still look at.
  const bool meets = request.kind == Kind::Barrier ||
                     ((request.kind == Kind::Allreduce || request.kind == Kind::Broadcast) && request.bytes() > 0);
  if (!lane_ || !meets) return false;
  const uint32_t number = pending_.number_of(request);
  if (number == kNoId) return false;
  const std::unique_lock driving(driver_, std::try_to_lock);
  // What is pending comes first, on every rank; so whoever is in the lane has run the same plans.
  if (!driving || !pending_.empty() || !plans_.empty()) return false;
  operation->submitted_ns = now_ns();
  if (!lane_->agree(number, executed_, [this] { return pending_.fresh(); })) return false;
  try {
    run_operations({request.kind, {}}, {&operation, 1});
  } catch (const Error& error) {
    poison(error);
  }
  return true;
}

bool Engine::wait(Operation& operation, nanoseconds limit) {
  if (operation.done()) return true;
  const uint64_t deadline = now_ns() + static_cast<uint64_t>(limit.count());
  waiters_.fetch_add(1);
  uint64_t pauses = 0;
  uint64_t idle_since = 0;
  for (;;) {
    const uint32_t seen = doorbell().load();
    std::unique_lock driving(driver_, std::try_to_lock);
    if (!driving) {
      // Somebody else drives; if it sleeps, our submission is news to it.
      doorbell().bump();
      operation.sleep(kNap);
    } else if (progress()) {
      pauses = 0;
    } else if (!operation.done()) {
      ++pauses;
      if (pauses % kLookEvery == 0) {
        const uint64_t now = now_ns();
        if (pauses == kLookEvery) idle_since = now;
        look_for_lost();
        if (now - idle_since > static_cast<uint64_t>(options_.spin.count())) {
          driving.unlock();
          doorbell().sleep(seen, kNap);
          pauses = 0;
        }
      }
    }
    if (operation.done() || (pauses % kLookEvery == 0 && now_ns() > deadline)) break;
  }
  if (waiters_.fetch_sub(1) == 1 && has_work()) work_.bump();
  return operation.done();
}

void Engine::background() noexcept {
  Life& life = wiring_.segment->area(local_rank_).life;
  try {
    life.begin();
    born_.set_value();
  } catch (...) {
    born_.set_exception(std::current_exception());
    return;
  }
  while (!stop_.load()) {
    const uint32_t work_seen = work_.load();
    if (waiters_.load() > 0 || !has_work()) {
      work_.sleep(work_seen, kIdleNap);
      if (wiring_.rank != 0 || waiters_.load() > 0) continue;
    }
    const uint32_t seen = doorbell().load();
    bool moved = false;
    {
      const std::lock_guard driving(driver_);
      moved = progress();
      if (!moved) look_for_lost();
    }
    if (!moved && has_work() && waiters_.load() == 0 && !stop_.load()) doorbell().sleep(seen, kNap);
  }
  life.end();
}

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
    if (farewell.rank >= 0 && farewell.rank < wiring_.size) left_[static_cast<size_t>(farewell.rank)] = true;
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

Error Engine::root_cause(const Error& error) {
  if (!listens_always_ || error.kind != ErrorKind::PeerLost) return error;
  // A connection that breaks may only show that its other end has already given up because of a third rank.
  const uint64_t until = now_ns() + static_cast<uint64_t>(nanoseconds(kHearsay).count());
  try {
    while (now_ns() < until) {
      if (const auto abort = wiring_.segment->aborted()) return Error::peer_lost("", abort->rank, reason_of(abort->reason));
      hear();
      std::this_thread::sleep_for(milliseconds(1));
    }
  } catch (const Error& told) {
    return told;
  }
  return error;
}

void Engine::refuse(const Refusal& refusal) {
  // Our own request was on its way when the coordinator gave up waiting for it: it counts as a new one there.
  const auto& late = refusal.error.ranks;
  if (refusal.error.kind == ErrorKind::Timeout && std::find(late.begin(), late.end(), wiring_.rank) != late.end()) return;
  // A rank that a timeout was waiting for has nothing to fail.
  if (const OperationPtr operation = pending_.take(refusal.name)) fail(operation, refusal.error);
}

void Engine::fail(const OperationPtr& operation, const Error& error) {
  operation->error = error.named(operation->request.name);
  operation->keep.reset();
  operation->finish();
}

void Engine::check() {
  if (const auto abort = wiring_.segment->aborted())
    throw Error::peer_lost("", abort->rank, reason_of(abort->reason));
  if (stop_.load()) throw Error::closed("it was shut down while this operation ran");
  if (operation_deadline_ns_ != 0 && now_ns() > operation_deadline_ns_)
    throw Error::timeout("", {}, seconds_of(static_cast<uint64_t>(options_.timeout.count())));
  // The others may wait for the rest of a plan that did not fit into their rings.
  for (ControlStream& control : controls_) control.flush();
  if (!listens_always_) return;
  hear();  // a farewell names the guilty rank
  if (const auto lost = lost_remote()) throw *lost;
}

std::optional<Error> Engine::lost_remote() const {
  // Peers in memory are known by their life words.
  for (const ControlStream& control : controls_)
    if (control.fd() >= 0 && control.lost() && !left_[static_cast<size_t>(control.peer())]) return control.lost();
  return std::nullopt;
}

void Engine::look_for_lost() {
  try {
    if (const auto abort = wiring_.segment->aborted())
      throw Error::peer_lost("", abort->rank, reason_of(abort->reason));
    look_for_overdue();
    std::optional<Error> lost;
    for (size_t i = 0; i < wiring_.local_ranks.size(); ++i) {
      const int rank = wiring_.local_ranks[i];
      const Life::State state = wiring_.segment->area(static_cast<int>(i)).life.state();
      if (state == Life::State::Left) left_[static_cast<size_t>(rank)] = true;
      if (state == Life::State::Dead) lost = Error::peer_lost("", rank, farandole::reason_of(state));
    }
    if (!lost) lost = lost_remote();
    look_for_left();
    if (!lost) return;
    // What the lost rank said before it went still counts: only what is pending after that has failed.
    while (drive_once()) {
    }
    if (!pending_.empty()) throw *lost;
  } catch (const Error& error) {
    poison(error);
  }
}

/// A rank that has shut down did its part of all that it had asked for. What it has not asked for can never run: the
/// coordinator refuses that, and the others stop by themselves when the coordinator is gone.
void Engine::look_for_left() {
  const std::string reason = reason_of(Abort::Reason::Left);
  const auto own = static_cast<size_t>(wiring_.rank);
  for (size_t rank = 0; rank < left_.size(); ++rank) {
    if (!left_[rank] || rank == own || told_[rank]) continue;
    if (wiring_.rank != 0 && rank != 0) continue;
    while (drive_once()) {
    }
    if (wiring_.rank == 0) {
      told_[rank] = true;
      negotiator_.leave(static_cast<int>(rank), reason);
    } else if (!pending_.empty()) {
      throw Error::peer_lost("", 0, reason);
    }
  }
}

void Engine::look_for_overdue() {
  // The negotiator fails what not all ranks ask for; this is for a coordinator that lives but no longer answers.
  constexpr uint64_t kSecond = 1'000'000'000;
  const auto timeout = static_cast<uint64_t>(options_.timeout.count());
  const uint64_t now = now_ns();
  if (timeout == 0 || now - looked_ns_ < kSecond) return;
  looked_ns_ = now;
  if (now < timeout + 5 * kSecond) return;
  if (const OperationPtr late = pending_.overdue(now - timeout - 5 * kSecond))
    throw Error::timeout(late->request.name, {0}, seconds_of(now - late->submitted_ns));
}

void Engine::poison(Error error) noexcept {
  if (failed_.exchange(true)) return;
  pending_.refuse(error);
  wiring_.segment->abort(abort_of(error, wiring_.rank));
  const Farewell farewell = error.kind == ErrorKind::PeerLost
                                ? Farewell{error.rank, false, error.reason}
                                : Farewell{wiring_.rank, false, std::string("it failed: ") + error.what()};
  for (ControlStream& control : controls_)
    if (control.fd() >= 0) control.send(farewell);
  fail_pending(error);
}

void Engine::fail_pending(const Error& error) {
  for (const OperationPtr& operation : pending_.take_all()) fail(operation, error);
}

void Engine::shutdown() {
  if (closed_.exchange(true)) return;
  pending_.refuse(Error::closed("it was shut down"));
  // What all ranks have agreed on may still be under way; the others count on our part in it.
  const uint64_t until = now_ns() + static_cast<uint64_t>(nanoseconds(kLastWords).count());
  std::unique_lock driving(driver_, std::defer_lock);
  while (!driving.try_lock() && now_ns() < until) std::this_thread::sleep_for(milliseconds(1));
  stop_.store(!driving);
  if (!driving) driving.lock();
  if (progress()) progress();
  fail_pending(Error::closed("it was shut down while this operation was pending"));
  for (ControlStream& control : controls_) {
    if (control.fd() < 0) continue;  // a peer in memory sees our life end
    control.send(Farewell{wiring_.rank, true, reason_of(Abort::Reason::Left)});
    while (!control.flush() && now_ns() < until) std::this_thread::sleep_for(milliseconds(1));
  }
  driving.unlock();
  stop_.store(true);
  work_.bump();
  doorbell().bump();
  thread_.join();
  for (int rank = 0; rank < wiring_.segment->ranks(); ++rank) wiring_.segment->area(rank).doorbell.bump();
  doorman_.reset();
}

EngineStats Engine::stats() {
  const std::lock_guard lock(stats_mu_);
  return stats_;
}

}  // namespace farandole
