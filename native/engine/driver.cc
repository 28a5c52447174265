#include "engine/driver.h"

#include <sys/prctl.h>

#include <algorithm>

#include "base/clock.h"
#include "transport/waiter.h"

namespace farandole {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kNap{5};        // longest sleep of a thread that watches for lost ranks
constexpr milliseconds kIdleNap{200};  // longest sleep without work; also the tick of the coordinator's checks
constexpr milliseconds kLull{2};       // a thread that has just waited is expected to wait again within this time
constexpr microseconds kFlow{10};      // requests at shorter intervals belong together
constexpr microseconds kStream{60};    // the same within a burst, where the driver's thread itself may delay requests
constexpr microseconds kGather{150};   // a nap costs the submitting thread some 20 us of its core
constexpr int kMostGathering = 7;
constexpr uint64_t kLookEvery = 4;  // rounds of a wait, each with system calls for links
constexpr uint64_t kCheckEvery = 64;

uint64_t ns(nanoseconds span) { return static_cast<uint64_t>(span.count()); }

}  // namespace

Driver::Driver(const Wiring& wiring, nanoseconds spin, bool always_listens, const Pending& pending, Work& work)
    : wiring_(wiring),
      spin_ns_(ns(spin)),
      always_listens_(always_listens),
      pending_(pending),
      work_(work),
      doorbell_(wiring.own_area().doorbell) {}

void Driver::start() {
  thread_ = std::thread(&Driver::run, this);
  try {
    started_.get_future().get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

void Driver::wake(uint64_t now) {
  submitted_ns_.store(now, std::memory_order_relaxed);
  if (waiters_.load() > 0) {
    doorbell_.wake_sleepers();  // the waiter drives, and checks by itself while it is awake
  } else if (!called_.exchange(true)) {
    // Ring once for all requests until the thread wakes: a ring costs more than a request.
    bell_.bump();
    doorbell_.wake_sleepers();
  }
}

bool Driver::wait(Operation& operation, nanoseconds limit) {
  const uint64_t begin = now_ns();
  const uint64_t deadline = begin + ns(limit);
  waiters_.fetch_add(1);
  Lock driving(mu_, std::defer_lock);
  uint64_t pauses = 0;
  uint64_t idle_since = 0;
  while (!operation.done()) {
    const uint32_t turn = turn_.load();
    if (!driving && !driving.try_lock()) {
      turn_.sleep_unless(turn, kNap, [&] { return operation.done() || driving.try_lock(); });
      if (now_ns() > deadline) break;
      continue;
    }
    const uint32_t seen = doorbell_.load();
    if (work_.progress()) {
      if (waiters_.load() > 1) {
        turn_.wake_sleepers();
        doorbell_.wake_sleepers();  // the previous driver may sleep on it
      }
      pauses = 0;
      continue;
    }
    relax();
    if (++pauses % kLookEvery != 0) continue;
    const uint64_t now = now_ns();
    if (pauses == kLookEvery) idle_since = now;
    const bool awake = stay_awake(now - idle_since, spin_ns_);
    if (!awake || pauses % kCheckEvery == 0) work_.check_peers();
    if (now > deadline) break;
    if (awake) continue;
    work_.arm_doorbell();
    driving.unlock();
    turn_.wake_sleepers();
    doorbell_.sleep_unless(seen, kNap, [this] { return pending_.has_new(); });
    pauses = 0;
  }
  if (driving) driving.unlock();
  turn_.wake_sleepers();
  const uint64_t end = now_ns();
  waited_ns_.fetch_add(end - begin, std::memory_order_relaxed);
  last_wait_ns_.store(end, std::memory_order_relaxed);
  if (waiters_.fetch_sub(1) == 1 && !pending_.empty() && !called_.exchange(true)) bell_.bump();
  return operation.done();
}

/// Return whether another thread drives, or is expected to within kLull. A rank without pending operations delays no
/// peer in that time: no operation runs without a request of this rank.
bool Driver::has_waiter() const {
  if (waiters_.load() > 0) return true;
  return pending_.empty() && now_ns() < last_wait_ns_.load(std::memory_order_relaxed) + ns(kLull);
}

void Driver::run() noexcept {
  Life& life = wiring_.own_area().life;
  try {
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // by default the kernel wakes a sleeper up to 50 us late
    life.begin();
    started_.set_value();
  } catch (...) {
    started_.set_exception(std::current_exception());
    return;
  }
  while (!stopping_.load()) {
    const uint32_t bell_seen = bell_.load();
    // Clear the flag before the report, so that a later caller rings the bell again.
    called_.exchange(false);
    report();
    if (has_waiter() || !has_work()) {
      // Woken by a waiter only if it leaves operations behind.
      bell_.sleep(bell_seen, always_listens_ ? kLull : kIdleNap);
      if (!wiring_.is_coordinator() || has_waiter()) continue;
    }
    collect_burst();
    if (waiters_.load() > 0) continue;  // the waiter would have to wait for its turn
    const uint32_t seen = doorbell_.load();
    const bool moved = drive_in_background();
    if (waiters_.load() > 0) turn_.wake_sleepers();
    if (!moved && has_work() && waiters_.load() == 0 && !stopping_.load())
      doorbell_.sleep_unless(seen, kNap, [this] { return pending_.has_new() || has_finished_.load(); });
  }
  life.end();
}

bool Driver::drive_in_background() {
  const std::lock_guard driving(mu_);
  if (stopping_.load()) return false;
  in_background_ = true;
  const bool moved = work_.progress();
  if (!moved) {
    work_.check_peers();
    work_.arm_doorbell();
  }
  in_background_ = false;
  return moved;
}

/// Wait for more requests while they arrive in quick succession. Handling them one by one would make many small buckets
/// and disturb the submitting thread. A single request does not wait, except the first one after a burst.
void Driver::collect_burst() {
  for (int naps = 0; naps < kMostGathering; ++naps) {
    // A thread that waits for one operation after another pauses for a moment in between.
    const uint64_t last =
        std::max(submitted_ns_.load(std::memory_order_relaxed), last_wait_ns_.load(std::memory_order_relaxed));
    const bool flows = now_ns() < last + ns(in_burst_ ? kStream : kFlow);
    const size_t queued = pending_.queued();
    if (queued > 0 && (naps > 0 || !flows)) in_burst_ = queued > 1;
    if (!flows || (queued < 2 && !in_burst_) || waiters_.load() > 0 || stopping_.load()) return;
    std::this_thread::sleep_for(kGather);
  }
}

void Driver::complete(const OperationPtr& operation) {
  operation->keep.reset();
  operation->finish();
  if (operation->listener.done == nullptr) return;
  {
    const std::lock_guard lock(finished_mu_);
    finished_.push_back(operation);
  }
  if (has_finished_.exchange(true) || in_background_) return;
  bell_.bump();
  doorbell_.wake_sleepers();
}

void Driver::fail(const OperationPtr& operation, const Error& error) {
  operation->error = wiring_.in_job_ranks(error).named(operation->request.name);
  complete(operation);
}

void Driver::report() noexcept {
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

Driver::Lock Driver::take_over(uint64_t deadline) {
  Lock driving(mu_, std::defer_lock);
  while (!driving.try_lock() && now_ns() < deadline) std::this_thread::sleep_for(milliseconds(1));
  stopping_.store(!driving);
  if (!driving) driving.lock();
  return driving;
}

void Driver::stop(Lock driving) {
  // Before the lock is free: the thread may wait for it, and would run a plan whose operations have failed.
  stopping_.store(true);
  driving.unlock();
  bell_.bump();
  doorbell_.bump();
  thread_.join();
}

void Driver::abandon() { static_cast<void>(new std::thread(std::move(thread_))); }

}  // namespace farandole
