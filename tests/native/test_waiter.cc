// A waiting thread spins, gives its core to others that want it, and sleeps at last.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "transport/waiter.h"

using namespace farandole;

namespace {

constexpr uint64_t kMicrosecond = 1000;
constexpr uint64_t kSecond = 1'000'000'000;

void test_first_spins_and_sleeps_at_last() {
  CHECK(stay_awake(0, 100 * kMicrosecond));
  CHECK(stay_awake(kMicrosecond / 2, kMicrosecond));
  CHECK(!stay_awake(101 * kMicrosecond, 100 * kMicrosecond));
}

// Puts this thread on the first core that the process may use.
void take_first_core() {
  cpu_set_t usable, first;
  CHECK_EQ(sched_getaffinity(0, sizeof usable, &usable), 0);
  CPU_ZERO(&first);
  int core = 0;
  while (!CPU_ISSET(core, &usable)) ++core;
  CPU_SET(core, &first);
  CHECK_EQ(sched_setaffinity(0, sizeof first, &first), 0);
}

// Without yields each turn would take a time slice of the kernel, which has some 100,000 looks.
void test_two_threads_take_turns_on_one_core() {
  constexpr int kTurns = 200;
  std::atomic<int> turn{0};
  std::atomic<int> looks{0};
  const auto play = [&](int mine) {
    take_first_core();
    for (int k = mine; k < kTurns; k += 2) {
      while (turn.load() != k) {
        ++looks;
        if (!stay_awake(20 * kMicrosecond, kSecond)) std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      ++turn;
    }
  };
  {
    std::jthread first(play, 0), second(play, 1);
  }
  CHECK_EQ(turn.load(), kTurns);
  check::that(looks.load() < 1000 * kTurns, "few looks in a turn", std::to_string(looks.load()));
}

// A process that computes takes three milliseconds at each yield.
void test_rests_grow_while_each_yield_costs_a_slice() {
  YieldRest rest;
  uint64_t now = kSecond;
  uint64_t taken = 0;
  int yields = 0;
  for (; now < 61 * kSecond; now = rest.until() + kMicrosecond, ++yields) {
    CHECK(rest.note(now, now + 3000 * kMicrosecond));
    CHECK(rest.until() <= now + 3000 * kMicrosecond + YieldRest::kMost);
    taken += 3000 * kMicrosecond;
  }
  check::that(yields < 70 && taken < 60 * kSecond / 250, "few slices in a minute", std::to_string(yields));
}

void test_a_rest_after_a_long_time_is_short() {
  YieldRest rest;
  uint64_t now = kSecond;
  CHECK(!rest.note(now, now + YieldRest::kSlice));
  CHECK_EQ(rest.until(), 0u);
  for (int k = 0; k < 5; ++k) {
    CHECK(rest.note(now, now + YieldRest::kSlice + 1));
    CHECK_EQ(rest.until(), now + YieldRest::kSlice + 1 + YieldRest::kLeast);
    now = rest.until() + YieldRest::kSoon * YieldRest::kLeast;
  }
}

}  // namespace

int main() {
  test_rests_grow_while_each_yield_costs_a_slice();
  test_a_rest_after_a_long_time_is_short();
  test_first_spins_and_sleeps_at_last();
  test_two_threads_take_turns_on_one_core();
  return check::report();
}
