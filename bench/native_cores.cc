// Measures how long a cache line takes from one core to another and back.
//
// usage: native_cores [ROUNDS], 21 of them by default
// Two threads, each on a core of its own, hand one word to each other. Prints minimum, median and maximum over rounds,
// for the first core with each of up to 15 others on which this process may run.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace {

constexpr uint32_t kTrips = 20'000;
constexpr size_t kMostPeers = 15;

struct alignas(128) Line {
  std::atomic<uint32_t> turn{0};
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "native_cores: %s\n", what);
  std::exit(1);
}

std::vector<int> cores() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) fail("the cores of this process cannot be read");
  std::vector<int> found;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) found.push_back(core);
  return found;
}

void stay_on(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  if (pthread_setaffinity_np(pthread_self(), sizeof only, &only) != 0) fail("a thread cannot be bound to a core");
}

/// Waits for each even turn, or each odd one, and gives the word back.
void pass(Line& line, uint32_t first) {
  for (uint32_t turn = first; turn < 2 * kTrips; turn += 2) {
    while (line.turn.load(std::memory_order_acquire) != turn) {
    }
    line.turn.store(turn + 1, std::memory_order_release);
  }
}

double nanoseconds_per_trip(int here, int there) {
  Line line;
  std::atomic<bool> ready{false};
  std::thread peer([&] {
    stay_on(there);
    ready.store(true);
    pass(line, 1);
  });
  stay_on(here);
  while (!ready.load()) std::this_thread::yield();
  const auto begin = farandole::now_ns();
  pass(line, 0);
  peer.join();
  return static_cast<double>(farandole::now_ns() - begin) / kTrips;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(std::atoi(argv[1]), 1) : 21;
  const std::vector<int> all = cores();
  if (all.size() < 2) std::puts("cache line, there and back: this process may run on one core only");
  for (size_t other = 1; other < std::min(all.size(), kMostPeers + 1); ++other) {
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) times.push_back(nanoseconds_per_trip(all[0], all[other]));
    std::ranges::sort(times);
    std::printf("cache line, there and back, cores %d and %d: %.0f / %.0f / %.0f ns\n", all[0], all[other],
                times.front(), times[times.size() / 2], times.back());
  }
}
