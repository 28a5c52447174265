#include "transport/waiter.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "base/clock.h"

namespace farandole {
namespace {

// Interval at which a sleeper checks for events that cannot wake it: a dead peer, an abort, a deadline.
constexpr std::chrono::milliseconds kNap{5};
constexpr uint64_t kLookEvery = 64;  // pauses
constexpr uint64_t kCalls = 16;      // pauses in the time of the system calls that look at a link

// A yield that took this long has given the core to another thread. It may be there at the next waits, too.
constexpr uint64_t kSwitch = 2'000;          // ns
constexpr uint64_t kSharedFor = 10'000'000;  // ns
constexpr uint64_t kSpinAlone = 10'000;      // ns
constexpr uint64_t kSpinShared = 1'000;      // ns

thread_local YieldRest rest;
thread_local uint64_t shared_until = 0;

}  // namespace

bool YieldRest::note(uint64_t begin, uint64_t end) {
  if (end - begin <= kSlice) return false;
  length_ = begin < until_ + kSoon * length_ ? std::min(2 * length_, kMost) : kLeast;
  until_ = end + length_;
  return true;
}

bool yield_core() {
  const uint64_t begin = now_ns();
  if (begin < rest.until()) return false;
  sched_yield();
  const uint64_t end = now_ns();
  if (!rest.note(begin, end) && end - begin > kSwitch) shared_until = end + kSharedFor;
  return true;
}

bool stay_awake(uint64_t waited, uint64_t most) {
  if (waited > most) return false;
  if (waited <= (now_ns() < std::max(shared_until, rest.until()) ? kSpinShared : kSpinAlone)) return true;
  return yield_core();
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool Waiter::spin_on(uint64_t pauses) {
  pauses_ += pauses;
  if (pauses_ % kLookEvery == 0) {
    const uint64_t now = now_ns();
    if (pauses_ == kLookEvery) since_ns_ = now;
    // Between hosts the guard reads sockets, too.
    if (pauses == 1 || pauses_ % (kCalls * kLookEvery) == 0) guard_.check();
    const uint64_t most = static_cast<uint64_t>(guard_.spins_briefly() ? 0 : policy_.spin.count());
    if (!stay_awake(now - since_ns_, most)) return false;
  } else if (pauses_ > kLookEvery && policy_.shares_cores()) {
    if (!yield_core()) return false;
  }
  relax();
  return true;
}

void Waiter::pause(std::span<pollfd> fds) {
  if (spin_on(kCalls)) return;
  if (!fds.empty()) {
    ::poll(fds.data(), fds.size(), static_cast<int>(kNap.count()));
  } else {
    // A link through memory has no descriptor; its peer is on this host and will respond shortly.
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  guard_.check();
  pauses_ = 0;  // spin again: more data may follow at once
}

void Waiter::wait_for(Signal& signal, uint32_t target) {
  pauses_ = 0;
  for (;;) {
    const uint32_t seen = signal.load();
    if (static_cast<int32_t>(seen - target) >= 0) return;
    if (spin_on(1)) continue;
    signal.sleep(seen, kNap);
    if (signal.reached(target)) return;
    guard_.check();
    pauses_ = 0;
  }
}

}  // namespace farandole
