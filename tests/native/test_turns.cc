// Rank 0 changes knobs while ranks work: all ranks change between the same two plans, whether they agree through rank 0
// or in the lane, and results stay the same.
#include <atomic>
#include <random>
#include <thread>

#include "check.h"
#include "engine/pace.h"
#include "engine_ranks.h"

using namespace ranks;
using farandole::Knobs;
using farandole::Pace;

namespace {

const std::vector<std::vector<int>> kWorlds = {{0}, {0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 1, 2}};

Knobs random_knobs(std::mt19937& random) {
  const size_t thresholds[] = {0, 1000, 100'000, size_t{128} << 20};
  return {thresholds[random() % 4], size_t{4096} << random() % 4, size_t{4096} << random() % 7,
          size_t{1} << random() % 20, random() % 2 == 0};
}

// Input of all ranks for element `at` of tensor `i` in `round`: whole numbers, so that every order has the same sum.
float value(int rank, size_t i, int round, size_t at) {
  return static_cast<float>((static_cast<size_t>(rank) + 3 * i + static_cast<size_t>(round) + at) % 64);
}

void check_sum(const std::vector<float>& got, int ranks, size_t i, int round) {
  size_t wrong = 0;
  for (size_t at = 0; at < got.size(); ++at) {
    float sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += value(rank, i, round, at);
    wrong += got[at] != sum ? 1 : 0;
  }
  CHECK_EQ(wrong, size_t{0});
}

// Steps of small and large tensors, submitted together, then one by one with a wait each, and a broadcast in between. A
// thread of rank 0 changes the knobs as fast as it can; so does rank 0 every second round, however busy the machine is.
void work_while_turned(Engine& engine) {
  constexpr int kRounds = 60;
  const size_t counts[] = {3, 700, 5000, 60'000};
  std::atomic<bool> stop{false};
  std::thread turner;
  if (engine.rank() == 0)
    turner = std::thread([&] {
      std::mt19937 random(7);
      while (!stop.load()) {
        engine.turn(random_knobs(random), true);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      }
    });
  std::exception_ptr problem;
  try {
    std::mt19937 own_random(8);
    for (int round = 0; round < kRounds; ++round) {
      if (engine.rank() == 0 && round % 2 == 0) engine.turn(random_knobs(own_random), true);
      std::vector<std::vector<float>> tensors;
      std::vector<OperationPtr> asked;
      for (size_t i = 0; i < std::size(counts); ++i) {
        tensors.emplace_back(counts[i]);
        for (size_t at = 0; at < counts[i]; ++at) tensors[i][at] = value(engine.rank(), i, round, at);
      }
      for (size_t i = 0; i < std::size(counts); ++i) asked.push_back(sum("t" + std::to_string(i), tensors[i]));
      if (round % 3 == 0) {
        engine.submit(asked, true);
        for (const OperationPtr& each : asked) finish(engine, each);
      } else {
        for (const OperationPtr& each : asked) run_now(engine, each);
      }
      for (size_t i = 0; i < std::size(counts); ++i) check_sum(tensors[i], engine.size(), i, round);
      std::vector<float> spread(40'000, static_cast<float>(engine.rank() + round));
      OperationPtr from_last = sum("spread", spread);
      from_last->request.kind = Kind::Broadcast;
      from_last->request.root = engine.size() - 1;
      run_now(engine, from_last);
      CHECK_EQ(spread.back(), static_cast<float>(engine.size() - 1 + round));
    }
  } catch (...) {
    problem = std::current_exception();
  }
  stop.store(true);
  if (turner.joinable()) turner.join();
  if (problem) std::rethrow_exception(problem);
  CHECK(engine.tuned().turns > kRounds / 4);
}

void all_ranks_have_turned(Engine& engine) {
  Knobs wanted;
  wanted.slot_bytes = 8192;
  wanted.hierarchical = false;
  std::vector<float> one(10, 1.0f);
  run_now(engine, sum("first", one));
  if (engine.rank() == 0) {
    engine.turn(wanted, true);
    CHECK(engine.tuned().knobs == Knobs());
    Knobs wrong;
    wrong.link_chunk = 100;
    bool refused = false;
    try {
      engine.turn(wrong, false);
    } catch (const Error& error) {
      refused = error.kind == farandole::ErrorKind::Invalid;
    }
    CHECK(refused);
  }
  // Known to all ranks, with nothing else under way: without the change it would run in the lane.
  for (int step = 0; step < 3; ++step) run_now(engine, sum("first", one));
  const Engine::Tuned tuned = engine.tuned();
  CHECK(tuned.knobs == wanted);
  CHECK_EQ(tuned.turns, uint64_t{1});
  CHECK_EQ(tuned.marks.size(), size_t{engine.rank() == 0 ? 3u : 0u});
  if (engine.rank() == 0) CHECK_EQ(tuned.marks[2].bytes - tuned.marks[1].bytes, uint64_t{40});
}

// Steps are found by recurring names, in any order and number of transfers.
void test_pace() {
  std::vector<float> none;
  const auto named = [&](const char* name) { return sum(name, none); };
  Pace pace;
  uint64_t now = 0;
  const auto add = [&](std::vector<OperationPtr> operations) {
    ++now;
    pace.add(operations, now, 100 * now);
  };
  add({named("a"), named("b")});
  add({named("c")});
  CHECK_EQ(pace.marks().size(), size_t{1});
  add({named("b"), named("c")});
  add({named("a"), named("d")});
  CHECK_EQ(pace.marks().size(), size_t{2});
  CHECK_EQ(pace.marks()[1].ns, uint64_t{3});
  CHECK_EQ(pace.marks()[1].bytes, uint64_t{300});
  add({named("d")});  // second time: no more often than the others
  CHECK_EQ(pace.marks().size(), size_t{2});
  pace.restart();
  CHECK(pace.marks().empty());
  for (size_t i = 0; i < 2 * Pace::kMost; ++i) add({named("a")});
  CHECK_EQ(pace.marks().size(), Pace::kMost);
}

// With connections beyond the column, a grid works in one level too.
void run_flat_too(const std::vector<int>& hosts, const std::function<void(Engine&)>& body) {
  for (const std::string& problem : run(hosts, body, 20, 8, true)) check::equal(problem, "");
}

}  // namespace

int main() {
  test_pace();
  for (const auto& hosts : kWorlds) {
    for (const std::string& problem : run(hosts, work_while_turned)) check::equal(problem, "");
    for (const std::string& problem : run(hosts, all_ranks_have_turned)) check::equal(problem, "");
  }
  run_flat_too({0, 1, 0, 1}, work_while_turned);
  run_flat_too({0, 0, 1, 1, 2, 2}, work_while_turned);
  run_flat_too({0, 0, 1, 1}, all_ranks_have_turned);
  return check::report();
}
