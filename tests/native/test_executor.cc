// The executor alone: the test gives it plans, without a coordinator.
#include <chrono>
#include <thread>

#include "check.h"
#include "engine/executor.h"
#include "engine_parts.h"

using namespace farandole;
using parts::Parts;
using ranks::sum;

namespace {

AgreedPlan plan_of(Plan plan) { return {std::move(plan), 0, false}; }

Bucket bucket(const std::vector<std::string>& names, uint32_t first = kNoId) {
  Bucket made{Kind::Allreduce, {}};
  for (const std::string& name : names) {
    made.entries.push_back({name, first, {}});
    if (first != kNoId) ++first;
  }
  return made;
}

// Runs `body` for all ranks of a host at once.
void run_on_all(int size, const std::function<void(Parts&)>& body) {
  const auto all = parts::make(std::vector<int>(static_cast<size_t>(size), 0));
  std::vector<std::jthread> threads;
  for (const auto& each : all) threads.emplace_back([&body, &each] { body(*each); });
}

void test_a_bucket_runs(int size) {
  run_on_all(size, [size](Parts& rank) {
    std::vector<float> one(10, 1.0f), two(5000, 2.0f);
    const std::vector<OperationPtr> operations{sum("one", one), sum("two", two)};
    rank.pending.add(operations);
    rank.executor.run(plan_of({bucket({"one", "two"})}));
    for (const OperationPtr& each : operations) CHECK(each->done() && !each->error);
    CHECK_EQ(one[9], static_cast<float>(size));
    CHECK_EQ(two[4999], static_cast<float>(2 * size));
    const EngineStats stats = rank.executor.stats();
    CHECK_EQ(stats.operations, uint64_t{2});
    CHECK_EQ(stats.buckets, uint64_t{1});
    CHECK_EQ(stats.bytes, uint64_t{4 * 5010});
    CHECK(rank.pending.empty());
  });
}

// A joined rank runs the others' requests without its own.
void test_a_joined_rank_stands_in() {
  run_on_all(2, [](Parts& rank) {
    std::vector<float> values(10, 3.0f);
    const OperationPtr own = sum("x", values);
    if (rank.wiring.rank == 0) rank.add(own);
    Bucket joined = bucket({"x"});
    joined.entries[0].request = own->request;
    rank.executor.run(plan_of({joined}));
    if (rank.wiring.rank == 0) CHECK_EQ(values[9], 3.0f);
  });
}

void test_a_refusal_fails_one_operation() {
  const auto all = parts::make({0});
  Parts& rank = *all[0];
  std::vector<float> values(3, 1.0f);
  const OperationPtr refused = sum("x", values), late = sum("late", values);
  rank.add(refused);
  rank.add(late);
  rank.executor.run(plan_of({Refusal{"x", Error::mismatch("x", "shape", {{0, "a"}})},
                             Refusal{"never", Error::timeout("never", {3}, 1)},  // not requested here
                             Refusal{"late", Error::timeout("late", {0}, 1)}}));
  CHECK(refused->done() && refused->error && refused->error->kind == ErrorKind::Mismatch);
  CHECK(!late->done());  // this rank's own request is still in flight
}

void test_a_plan_that_does_not_fit_ends_the_job() {
  const auto all = parts::make({0});
  Parts& rank = *all[0];
  std::vector<float> values(3, 1.0f);
  const OperationPtr known = sum("known", values);
  rank.add(known);
  const Error error = CHECK_THROWS(Error, (rank.executor.run(plan_of({bucket({"known", "unknown"})})), 0));
  CHECK(error.kind == ErrorKind::Internal);
  CHECK(known->done() && known->error);  // taken from the pending operations, so the executor must fail it
}

void test_knobs_turn_and_mark_steps() {
  const auto all = parts::make({0});
  Parts& rank = *all[0];
  std::vector<float> values(10, 1.0f);
  const auto step = [&](bool turns) {
    rank.add(sum("x", values));
    Plan plan{bucket({"x"})};
    Knobs knobs;
    knobs.slot_bytes = 8192;
    if (turns) plan.insert(plan.begin(), knobs);
    rank.executor.run({std::move(plan), 0, turns});
  };
  step(false);
  CHECK(rank.executor.tuned().marks.empty() && rank.executor.tuned().turns == 0);
  step(true);
  step(false);
  const Tuned tuned = rank.executor.tuned();
  CHECK_EQ(tuned.turns, uint64_t{1});
  CHECK_EQ(tuned.knobs.slot_bytes, size_t{8192});
  CHECK_EQ(tuned.marks.size(), size_t{2});
}

void test_known_operations_run_in_the_lane() {
  run_on_all(2, [](Parts& rank) {
    std::vector<float> values(10, 1.0f);
    Recurring recurring;
    recurring.operations = {sum("x", values)};
    recurring.arrange();
    CHECK(rank.executor.can_run_in_lane(recurring));
    CHECK(!rank.executor.run_in_lane(recurring, [] {}));  // it has no number yet
    rank.pending.add(recurring.operations);
    rank.executor.run(plan_of({bucket({"x"}, 0)}));
    CHECK_EQ(values[9], 2.0f);
    // A rank may come too late for a round, but some round meets both.
    uint64_t runs = 0;
    for (int attempt = 0; attempt < 10'000 && runs == 0; ++attempt) {
      recurring.operations[0]->renew();
      if (rank.executor.run_in_lane(recurring, [] {})) ++runs;
    }
    CHECK_EQ(runs, uint64_t{1});
    CHECK_EQ(values[9], 4.0f);
    CHECK_EQ(rank.executor.stats().in_lane, runs);
  });
  run_on_all(2, [](Parts& rank) {
    std::vector<float> values(100'000, 1.0f);
    Recurring recurring;
    recurring.operations = {sum("large", values)};
    recurring.arrange();
    rank.pending.add(recurring.operations);
    (void)rank.pending.drain();  // nothing new interrupts the wait
    rank.executor.run(plan_of({bucket({"large"}, 0)}));
    int calls = 0;
    for (int attempt = 0; attempt < 10'000 && calls == 0; ++attempt) {
      recurring.operations[0]->renew();
      if (rank.wiring.rank == 1)
        std::this_thread::sleep_for(std::chrono::microseconds(100));  // the other waits in the lane
      int called = 0;
      if (rank.executor.run_in_lane(recurring, [&] { ++called; })) calls = called;
      CHECK(called <= 1);
    }
    CHECK_EQ(calls, 1);
  });
  Recurring gathers;
  std::vector<float> values(2);
  gathers.operations = {ranks::operation(Kind::Allgather, "g", DType::Float32, {2}, values.data(), nullptr)};
  gathers.arrange();
  const auto alone = parts::make({0});
  CHECK(!alone[0]->executor.can_run_in_lane(gathers));  // a rank may finish before another begins
}

void test_buffers_come_from_the_arena() {
  const auto all = parts::make({0});
  const std::shared_ptr<std::byte> buffer = all[0]->executor.shared_buffer(100);
  std::byte* arena = all[0]->wiring.segment->arena_if_mapped(0);
  CHECK(arena != nullptr && buffer.get() >= arena && buffer.get() < arena + Segment::kArenaBytes);
}

}  // namespace

int main() {
  for (const int size : {1, 2, 3}) test_a_bucket_runs(size);
  test_a_joined_rank_stands_in();
  test_a_refusal_fails_one_operation();
  test_a_plan_that_does_not_fit_ends_the_job();
  test_knobs_turn_and_mark_steps();
  test_known_operations_run_in_the_lane();
  test_buffers_come_from_the_arena();
  return check::report();
}
