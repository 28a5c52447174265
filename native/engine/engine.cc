#include "engine/engine.h"

#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "transport/shm_link.h"
#include "transport/tcp.h"

namespace farandole {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kNap{5};           // how long a sleeper that watches for lost peers sleeps at most
constexpr milliseconds kIdleNap{200};     // the same for a thread without work: it ticks for the negotiator
constexpr milliseconds kLull{2};          // who has just waited will soon wait again
constexpr milliseconds kLastWords{1000};  // for what is under way when the engine shuts down
constexpr microseconds kFlow{10};         // requests at shorter distance belong together
constexpr microseconds kStream{60};       // once they have come thick and fast: this thread itself may hold them up
constexpr microseconds kGather{150};      // a nap costs who submits some 20 us of its core
constexpr int kMostGathering = 7;
constexpr uint64_t kLookEvery = 64;

/// How long a rank waits, in seconds, for the ranks below it before the coordinator hears who is late.
double patience_of(const EngineOptions& options) {
  const double timeout = seconds_of(static_cast<uint64_t>(options.timeout.count()));
  return timeout > 0 ? std::min(1.0, timeout / 4) : 1.0;
}

}  // namespace

Engine::Engine(Wiring wiring, EngineOptions options)
    : wiring_(std::move(wiring)),
      options_(options),
      tree_(wiring_.parents),
      negotiator_({wiring_.size, options.knobs.fusion_threshold, options.cache_capacity,
                   seconds_of(static_cast<uint64_t>(options.timeout.count())), options.look_ahead}),
      collector_(wiring_.rank, tree_.children(wiring_.rank), patience_of(options)),
      world_(make_world()),
      left_(static_cast<size_t>(wiring_.size)),
      told_(static_cast<size_t>(wiring_.size)) {
  connect_control();
  world_.turn(tuned_.knobs);
  if (leads() && options_.knobs != tuned_.knobs) turn(options_.knobs, false);
  thread_ = std::thread(&Engine::background, this);
  try {
    born_.get_future().get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

Engine::~Engine() {
  shutdown();
  if (!is_forked()) return;
  // The threads run in the parent alone: here they can neither be joined nor told to end, only be forgotten.
  static_cast<void>(new std::thread(std::move(thread_)));
  static_cast<void>(doorman_.release());
}

World Engine::make_world() {
  const auto& local = wiring_.local_ranks;
  const bool one_host = local.size() == wiring_.hosts.size();
  const auto grid = grid_of(wiring_.rank, wiring_.hosts);
  // Connected to more ranks than the column.
  const bool flat = grid && std::ranges::count_if(wiring_.remotes,
                                                  [](const auto& each) { return each.data.is_open(); }) >= grid->hosts;
  local_rank_ = static_cast<int>(std::find(local.begin(), local.end(), wiring_.rank) - local.begin());
  if (static_cast<int>(wiring_.hosts.size()) != wiring_.size || local_rank_ == static_cast<int>(local.size()) ||
      wiring_.segment->ranks() != static_cast<int>(local.size()) ||
      wiring_.segment->has_pair_rings() != (!one_host && (!grid || flat)))
    throw Error::internal("the segment does not fit the ranks of this host");
  Guard& guard = *this;
  // More ranks than cores: whoever spins keeps the one it waits for from running.
  if (local.size() > std::thread::hardware_concurrency())
    options_.spin = std::min<nanoseconds>(options_.spin, std::chrono::microseconds(2));
  else if (one_host) lane_.emplace(*wiring_.segment, wiring_.rank, options_.spin);
  const Patience patience{options_.spin};
  const auto shared = [&] { return SharedMesh(wiring_.segment, local_rank_, local, guard, patience); };
  if (one_host) {
    arena_ = Arena::make(wiring_.segment, wiring_.rank);
    return World(std::make_unique<SharedMesh>(shared()));
  }

  std::unique_ptr<GridMesh> rows;
  if (grid) {
    std::vector<std::unique_ptr<Link>> column(static_cast<size_t>(grid->hosts));
    for (const int peer : data_peers(wiring_.rank, wiring_.hosts)) {
      const int host = grid->place_of(peer).first;
      column[static_cast<size_t>(host)] = data_link(peer, host, flat);
    }
    rows = std::make_unique<GridMesh>(*grid, shared(), Mesh(grid->host, std::move(column), guard, patience));
    if (!flat) return World(std::move(rows));
  }
  auto links = std::make_unique<Mesh>(wiring_.rank, links_to_all(), guard, patience);
  return rows ? World(std::move(rows), std::move(links)) : World(std::move(links));
}

/// A link over the connection to `peer`, `place` in its mesh. With `shared` another link can be had over the same: an
/// operation leaves nothing in it for the next one, whichever way that goes.
std::unique_ptr<Link> Engine::data_link(int peer, int place, bool shared) {
  const auto remote = std::ranges::find(wiring_.remotes, peer, &Wiring::Remote::peer);
  if (remote == wiring_.remotes.end() || !remote->data.is_open())
    throw Error::internal("there is no connection to rank " + std::to_string(peer));
  Descriptor fd = shared ? remote->data.duplicate() : std::move(remote->data);
  auto link = std::make_unique<TcpLink>(place, fd.release(), peer);
  data_links_.push_back({link.get(), Silence(static_cast<uint64_t>(options_.heartbeat.count()))});
  data_links_.back().silence.hear();  // it has just been connected
  return link;
}

/// By rank; those of this host by way of the segment.
std::vector<std::unique_ptr<Link>> Engine::links_to_all() {
  const auto& local = wiring_.local_ranks;
  std::vector<std::unique_ptr<Link>> links(static_cast<size_t>(wiring_.size));
  for (const int peer : data_peers(wiring_.rank, wiring_.hosts, true))
    links[static_cast<size_t>(peer)] = data_link(peer, peer, false);
  for (size_t i = 0; i < local.size(); ++i) {
    const auto peer = static_cast<int>(i);
    if (peer != local_rank_)
      links[static_cast<size_t>(local[i])] = std::make_unique<ShmLink>(
          local[i], wiring_.segment->area(peer), wiring_.segment->pair_ring(local_rank_, peer),
          wiring_.segment->pair_ring(peer, local_rank_), false);
  }
  return links;
}

void Engine::require_own_process(const std::string& name) const {
  if (is_forked())
    throw Error::invalid(name,
                         "this process was forked from a rank after its start, and only the rank itself can run "
                         "collectives; fork before init(), or start this process by spawn");
}

std::shared_ptr<std::byte> Engine::shared_buffer(size_t bytes) {
  require_own_process("empty_shared");
  if (closed_.load()) throw Error::closed("it was shut down");
  if (arena_) return arena_->take(bytes);
  const auto buffer = std::make_shared<ResultBuffer>(results_->take(bytes));
  return {buffer, buffer->data()};
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
  // The others would wait there for this rank in vain.
  if (operations.front()->request.kind == Kind::Join) wiring_.segment->lane().suspend();
  if (!wake) return;
  submitted_ns_.store(now, std::memory_order_relaxed);
  if (waiters_.load() > 0) {
    doorbell().nudge();  // who waits drives, and looks by itself while it is awake
  } else if (!called_.exchange(true)) {
    // Once for all that comes before the thread is there: a call costs more than a request.
    work_.bump();
    doorbell().nudge();
  }
}

bool Engine::wait(Operation& operation, nanoseconds limit) {
  if (operation.done()) return true;
  require_own_process(operation.request.name);
  const uint64_t begin = now_ns();
  const uint64_t deadline = begin + static_cast<uint64_t>(limit.count());
  waiters_.fetch_add(1);
  std::unique_lock driving(driver_, std::defer_lock);
  uint64_t pauses = 0;
  uint64_t idle_since = 0;
  while (!operation.done()) {
    const uint32_t turn = turn_.load();
    if (!driving && !driving.try_lock()) {
      turn_.sleep_unless(turn, kNap, [&] { return operation.done() || driving.try_lock(); });
      if (now_ns() > deadline) break;
      continue;
    }
    const uint32_t seen = doorbell().load();
    if (progress()) {
      if (waiters_.load() > 1) tell_waiters();
      pauses = 0;
      continue;
    }
    relax();
    if (++pauses % kLookEvery != 0) continue;
    const uint64_t now = now_ns();
    if (pauses == kLookEvery) idle_since = now;
    look_for_lost();
    if (now > deadline) break;
    if (now - idle_since <= static_cast<uint64_t>(options_.spin.count())) continue;
    listen();
    driving.unlock();
    turn_.nudge();
    doorbell().sleep_unless(seen, kNap, [this] { return pending_.fresh(); });
    pauses = 0;
  }
  if (driving) driving.unlock();
  turn_.nudge();
  const uint64_t end = now_ns();
  waited_ns_.fetch_add(end - begin, std::memory_order_relaxed);
  left_off_ns_.store(end, std::memory_order_relaxed);
  if (waiters_.fetch_sub(1) == 1 && !pending_.empty() && !called_.exchange(true)) work_.bump();
  return operation.done();
}

/// Does another thread drive, or will one in a moment? Where this rank has asked for nothing, the others miss nothing
/// in that time: whatever they ask for needs its word too.
bool Engine::is_attended() const {
  if (waiters_.load() > 0) return true;
  const uint64_t lull = static_cast<uint64_t>(nanoseconds(kLull).count());
  return pending_.empty() && now_ns() < left_off_ns_.load(std::memory_order_relaxed) + lull;
}

/// To be called before sleeping on the doorbell, with `driver_` held.
void Engine::listen() noexcept {
  try {
    if (doorman_) doorman_->listen();
  } catch (const Error& error) {
    poison(error);
  }
}

void Engine::tell_waiters() {
  turn_.nudge();
  doorbell().nudge();  // who drove before sleeps there
}

void Engine::background() noexcept {
  Life& life = wiring_.segment->area(local_rank_).life;
  try {
    // The kernel may be fifty microseconds late by default.
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    life.begin();
    born_.set_value();
  } catch (...) {
    born_.set_exception(std::current_exception());
    return;
  }
  while (!stop_.load()) {
    const uint32_t work_seen = work_.load();
    // In this order: who calls later also changes the bell.
    called_.exchange(false);
    report();
    if (is_attended() || !has_work()) {
      // Who waits only calls when something stays behind.
      work_.sleep(work_seen, listens_always_ ? kLull : kIdleNap);
      if (wiring_.rank != 0 || is_attended()) continue;
    }
    gather();
    if (waiters_.load() > 0) continue;  // it drives, and would only have to wait for its turn
    const uint32_t seen = doorbell().load();
    bool moved = false;
    {
      const std::lock_guard driving(driver_);
      in_the_way_ = true;
      moved = progress();
      if (!moved) {
        look_for_lost();
        listen();
      }
      in_the_way_ = false;
    }
    if (waiters_.load() > 0) turn_.nudge();  // who came meanwhile waits for its turn to drive
    if (!moved && has_work() && waiters_.load() == 0 && !stop_.load())
      doorbell().sleep_unless(seen, kNap, [this] { return pending_.fresh() || has_finished_.load(); });
  }
  life.end();
}

/// While requests come thick and fast, waits for more of them: taken one by one they would be many small buckets, and
/// would disturb the thread that submits. One that comes alone does not wait, but for the first after many.
void Engine::gather() {
  for (int naps = 0; naps < kMostGathering; ++naps) {
    // Who waits for one after the other is between two of them for a moment.
    const uint64_t last =
        std::max(submitted_ns_.load(std::memory_order_relaxed), left_off_ns_.load(std::memory_order_relaxed));
    const microseconds pace = came_many_ ? kStream : kFlow;
    const bool flows = now_ns() < last + static_cast<uint64_t>(nanoseconds(pace).count());
    const size_t queued = pending_.queued();
    if (queued > 0 && (naps > 0 || !flows)) came_many_ = queued > 1;
    if (!flows || (queued < 2 && !came_many_) || waiters_.load() > 0 || stop_.load()) return;
    std::this_thread::sleep_for(kGather);
  }
}

void Engine::shutdown() {
  if (is_forked()) return;
  std::unique_lock closing(closing_);  // a second caller returns when the first is done
  if (closed_.exchange(true)) return;
  pending_.refuse(told(Error::closed("it was shut down")));
  // What all ranks have agreed on may still be under way; the others count on our part in it.
  const uint64_t until = now_ns() + static_cast<uint64_t>(nanoseconds(kLastWords).count());
  std::unique_lock driving(driver_, std::defer_lock);
  while (!driving.try_lock() && now_ns() < until) std::this_thread::sleep_for(milliseconds(1));
  stop_.store(!driving);
  if (!driving) driving.lock();
  if (progress()) progress();
  fail_pending(Error::closed("it was shut down while this operation was pending"));
  for (ControlStream& control : controls_) {
    // After a failure the others are to hear of that, not that this rank left because of it.
    if (!failed_.load())
      control.send(
          Farewell{wiring_.rank, true, farandole::reason_of(Life::State::Left), first_left_.value_or(wiring_.rank)});
    while (!control.flush() && now_ns() < until) std::this_thread::sleep_for(milliseconds(1));
  }
  driving.unlock();
  stop_.store(true);
  work_.bump();
  doorbell().bump();
  thread_.join();
  for (int rank = 0; rank < wiring_.segment->ranks(); ++rank) wiring_.segment->area(rank).doorbell.bump();
  doorman_.reset();
  results_->close();
  closing.unlock();
  report();
}

void Engine::see_off() const {
  if (is_forked()) return;  // they are threads of the parent
  const uint64_t until = now_ns() + static_cast<uint64_t>(nanoseconds(kLastWords).count());
  while (visitors_.load() > 0 && now_ns() < until) std::this_thread::sleep_for(milliseconds(1));
}

void Engine::turn(const Knobs& knobs, bool paced) {
  require_own_process("turn");
  if (!leads()) throw Error::invalid("turn", "only rank 0 decides what all ranks work with");
  if (!knobs.valid()) throw Error::invalid("turn", "chunks are multiples of 64 bytes, of at least 4 KiB");
  const std::lock_guard lock(stats_mu_);
  wanted_ = knobs;
  pace_wanted_ = paced;
  turning_.store(true);
}

Engine::Tuned Engine::tuned() {
  const std::lock_guard lock(stats_mu_);
  Tuned tuned = tuned_;
  tuned.marks = pace_.marks();
  return tuned;
}

EngineStats Engine::stats() {
  const std::lock_guard lock(stats_mu_);
  EngineStats stats = stats_;
  stats.in_lane = agreed_in_lane_.load(std::memory_order_relaxed);
  stats.waited_ns = waited_ns_.load(std::memory_order_relaxed) + (lane_ ? lane_->waited_ns() : 0);
  return stats;
}

}  // namespace farandole
