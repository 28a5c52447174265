// The engine over every wiring: requests in any order give right results, disagreements fail by name, and waiting ranks
// get errors that name the departed rank.
#include <atomic>
#include <chrono>
#include <latch>
#include <random>

#include "check.h"
#include "engine_ranks.h"

using namespace ranks;

namespace {

const std::vector<std::vector<int>> kWorlds = {{0},    {0, 0},    {0, 0, 0},    {0, 0, 0, 0, 0},
                                               {0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 1, 2}};

// Hosts in a chain, so that some ranks are far from the coordinator.
const std::vector<std::vector<int>> kDeepWorlds = {{0, 1, 2, 3}, {0, 1, 1, 2, 0, 2, 3}};

std::string text(const std::vector<int>& hosts) {
  std::string out = "hosts";
  for (const int host : hosts) out += " " + std::to_string(host);
  return out;
}

float triangle(int size) { return static_cast<float>(size * (size + 1)) / 2; }

void sizes_from_one_to_many(Engine& engine) {
  for (const size_t count : {size_t{1}, size_t{7}, size_t{600}, size_t{5000}, size_t{300'000}}) {
    for (int round = 0; round < 3; ++round) {
      std::vector<float> values(count, static_cast<float>(engine.rank() + 1));
      run_now(engine, sum("x" + std::to_string(count), values));
      check::equal(values.front(), triangle(engine.size()));
      check::equal(values.back(), triangle(engine.size()));
    }
  }
}

// A group of two types, small and large: negotiated first, then in the lane. A rank that submits it instead still meets
// ranks that wait at once.
void groups_run_as_one(Engine& engine) {
  for (const size_t count : {size_t{3}, size_t{70'000}}) {
    farandole::Recurring group;
    std::vector<float> floats(count), more(2 * count);
    std::vector<double> doubles(count);
    const std::string name = "group of " + std::to_string(count);
    const auto add = [&](DType dtype, size_t elements, void* values) {
      group.operations.push_back(operation(Kind::Allreduce, name + std::to_string(group.operations.size()), dtype,
                                           {static_cast<int64_t>(elements)}, values, values));
      group.operations.back()->request.group = name;
      group.operations.back()->request.group_size = 3;
    };
    add(DType::Float32, count, floats.data());
    add(DType::Float64, count, doubles.data());
    add(DType::Float32, 2 * count, more.data());
    group.arrange();
    for (int round = 0; round < 6; ++round) {
      const auto mine = static_cast<float>(engine.rank() + 1);
      floats.assign(count, mine);
      doubles.assign(count, 2 * mine);
      more.assign(2 * count, 3 * mine);
      for (const OperationPtr& each : group.operations) each->renew();
      const bool submits = round == 4 && engine.rank() == 0;
      if (submits || !engine.run_in_lane(group, [] {})) engine.submit(group.operations, submits);
      for (const OperationPtr& each : group.operations) finish(engine, each);
      check::equal(floats.back(), triangle(engine.size()));
      check::equal(doubles.front(), static_cast<double>(2 * triangle(engine.size())));
      check::equal(more.back(), 3 * triangle(engine.size()));
    }
  }
}

// Two waiting threads drive in turn, and each learns of its operation's completion from the other.
void two_threads_wait(Engine& engine) {
  for (int round = 0; round < 50; ++round) {
    std::vector<float> one(5, 1.0f), two(3000, 2.0f);
    const OperationPtr first = sum("first", one);
    const OperationPtr second = sum("second", two);
    submit(engine, first);
    submit(engine, second);
    std::exception_ptr problem;
    std::thread other([&] {
      try {
        finish(engine, engine.rank() % 2 == 0 ? second : first);
      } catch (...) {
        problem = std::current_exception();
      }
    });
    finish(engine, engine.rank() % 2 == 0 ? first : second);
    other.join();
    if (problem) std::rethrow_exception(problem);
    check::equal(one[4], static_cast<float>(engine.size()));
    check::equal(two[2999], static_cast<float>(2 * engine.size()));
  }
}

void any_order_and_mixed_kinds(Engine& engine) {
  constexpr int kTensors = 40;
  std::mt19937 random(static_cast<unsigned>(engine.rank()));
  for (int round = 0; round < 4; ++round) {
    std::vector<std::vector<float>> values(kTensors);
    std::vector<OperationPtr> asked(kTensors);
    std::vector<int> order(kTensors);
    for (int i = 0; i < kTensors; ++i) order[static_cast<size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      auto& mine = values[static_cast<size_t>(i)];
      mine.assign(static_cast<size_t>(1 + 97 * i), static_cast<float>(engine.rank() + i));
      OperationPtr one = sum("t" + std::to_string(i), mine);
      if (i % 7 == 0) {
        one->request.kind = Kind::Broadcast;
        one->request.root = i % engine.size();
      } else if (i % 5 == 0) {
        one->request.op = ReduceOp::Max;
      } else if (i % 3 == 0) {
        one = operation(Kind::Allgather, "t" + std::to_string(i), DType::Float32, {engine.rank() + 1, 2}, mine.data(),
                        nullptr);
        mine.resize(static_cast<size_t>(2 * (engine.rank() + 1)), static_cast<float>(engine.rank() + i));
        one->input = reinterpret_cast<const std::byte*>(mine.data());
      }
      asked[static_cast<size_t>(i)] = one;
      submit(engine, one);
    }
    for (int i = 0; i < kTensors; ++i) {
      const OperationPtr& one = asked[static_cast<size_t>(i)];
      finish(engine, one);
      const int n = engine.size();
      const auto& mine = values[static_cast<size_t>(i)];
      if (one->request.kind == Kind::Broadcast) check::equal(mine.back(), static_cast<float>(i % n + i));
      else if (one->request.kind == Kind::Allgather)
        check::equal(one->result_shape[0], static_cast<int64_t>(n) * (n + 1) / 2);
      else if (one->request.op == ReduceOp::Max) check::equal(mine.back(), static_cast<float>(n - 1 + i));
      else check::equal(mine.back(), static_cast<float>(n * i + n * (n - 1) / 2));
    }
  }
}

// Requests and plans of many names exceed the control rings.
void more_names_than_a_ring_holds(Engine& engine) {
  constexpr int kTensors = 3000;
  const std::string prefix(200, 'n');
  std::vector<std::vector<float>> values(kTensors, std::vector<float>(3, 1.0f));
  std::vector<OperationPtr> asked;
  for (int i = 0; i < kTensors; ++i) {
    const int mine = engine.rank() % 2 == 0 ? i : kTensors - 1 - i;
    asked.push_back(sum(prefix + std::to_string(mine), values[static_cast<size_t>(mine)]));
    submit(engine, asked.back());
  }
  for (const OperationPtr& one : asked) finish(engine, one);
  for (const auto& each : values) check::equal(each[2], static_cast<float>(engine.size()));
}

void two_threads_at_once(Engine& engine) {
  const auto work = [&](const std::string& prefix) {
    for (int i = 0; i < 200; ++i) {
      std::vector<float> values(static_cast<size_t>(1 + i % 50), 1.0f);
      run_now(engine, sum(prefix + std::to_string(i % 10), values));
      check::equal(values.front(), static_cast<float>(engine.size()));
    }
  };
  std::thread other(work, "other");
  work("own");
  other.join();
}

void disagreement_fails_alone(Engine& engine) {
  std::vector<float> values(static_cast<size_t>(3 + engine.rank() % 2), 1.0f);
  if (engine.size() > 1) {
    const Error error = check::thrown<Error>([&] { run_now(engine, sum("shape", values)); });
    check::that(error.kind == farandole::ErrorKind::Mismatch, "error.kind == Mismatch", error.what());
    check::equal(error.what_differs, std::string("shape"));
    check::equal(error.asked.at(1), std::string("float32[4]"));
  }
  values.assign(5, 1.0f);
  run_now(engine, sum("shape", values));  // the name is free again, and the job continues
  check::equal(values[4], static_cast<float>(engine.size()));
}

// `heard` counts the ranks that have the error, except the absent one.
void absentee_is_named(Engine& engine, std::latch& heard) {
  if (engine.size() == 1) return;
  std::vector<float> values(3, 1.0f);
  if (engine.rank() != 1) {
    const Error error = check::thrown<Error>([&] { run_now(engine, sum("late", values)); });
    check::that(error.kind == farandole::ErrorKind::Timeout, "error.kind == Timeout", error.what());
    check::that(error.ranks == std::vector<int>{1}, "error.ranks == {1}", error.what());
    heard.count_down();
  }
  // All ranks stay until the last one has its error, because a departure would change the error.
  heard.wait();
  run_now(engine, operation(Kind::Barrier, "end", DType::UInt8, {}, nullptr, nullptr));
}

void leaver_is_named(Engine& engine) {
  const int leaver = engine.size() - 1;
  std::vector<float> values(3, 1.0f);
  if (engine.rank() == leaver) {
    run_now(engine, sum("together", values));
    return;  // the destructor leaves
  }
  const auto begin = std::chrono::steady_clock::now();
  const Error error = check::thrown<Error>([&] {
    // Another rank may already know of the failure while this one is still at its first operation.
    run_now(engine, sum("together", values));
    run_now(engine, sum("alone", values));
  });
  check::that(error.kind == farandole::ErrorKind::PeerLost, "error.kind == PeerLost", error.what());
  check::that(error.rank >= 0, "the error names a rank that left", error.what());
  check::that(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15), "noticed before the limit");
  // Later operations get the same error.
  const Error again = check::thrown<Error>([&] { run_now(engine, sum("later", values)); });
  check::that(again.kind == farandole::ErrorKind::PeerLost, "again.kind == PeerLost", again.what());
}

// An operation without bytes has no waits: a rank may leave before another receives the agreement.
void leaving_after_the_last_operation_fails_nobody(Engine& engine) {
  std::vector<float> none;
  run_now(engine, sum("nothing", none));
}

void pending_at_shutdown_fails(Engine& engine) {
  if (engine.size() == 1) return;
  std::vector<float> values(3, 1.0f);
  const OperationPtr never = sum("never " + std::to_string(engine.rank()), values);
  bool taken = true;
  try {
    submit(engine, never);
  } catch (const Error& error) {
    taken = false;  // others were faster and have left
    check::that(error.kind == farandole::ErrorKind::PeerLost, "error.kind == PeerLost", error.what());
  }
  engine.shutdown();
  check::that(!taken || (never->done() && never->error.has_value()), "what was pending has failed");
  engine.shutdown();  // idempotent
  check::thrown<Error>([&] { submit(engine, sum("after", values)); });
}

void same_name_twice_is_refused(Engine& engine) {
  if (engine.size() == 1) return;
  std::vector<float> values(3, 1.0f);
  std::vector<float> other(3, 1.0f);
  const OperationPtr first = sum("twice", values);
  const OperationPtr go = operation(Kind::Barrier, "go", DType::UInt8, {}, nullptr, nullptr);
  if (engine.rank() != 0) run_now(engine, go);
  submit(engine, first);
  if (engine.rank() == 0) {
    const Error error = check::thrown<Error>([&] { submit(engine, sum("twice", other)); });
    check::that(error.kind == farandole::ErrorKind::Invalid, "error.kind == Invalid", error.what());
    run_now(engine, go);
  }
  finish(engine, first);
}

void try_all(const std::vector<int>& hosts, size_t degree) {
  const auto expect_all_well = [&](const std::function<void(Engine&)>& body, double timeout = 20) {
    for (const std::string& problem : run(hosts, body, timeout, degree)) check::equal(problem, "", text(hosts));
  };
  expect_all_well(sizes_from_one_to_many);
  expect_all_well(groups_run_as_one);
  expect_all_well(two_threads_wait);
  expect_all_well(any_order_and_mixed_kinds);
  expect_all_well(more_names_than_a_ring_holds);
  expect_all_well(two_threads_at_once);
  expect_all_well(disagreement_fails_alone);
  std::latch heard(static_cast<std::ptrdiff_t>(hosts.size()) - 1);
  // The limit also holds for the final barrier, which all ranks reach when the last one has its error.
  expect_all_well([&](Engine& engine) { absentee_is_named(engine, heard); }, 1.0);
  expect_all_well(leaver_is_named);
  expect_all_well(pending_at_shutdown_fails);
  expect_all_well(same_name_twice_is_refused);
  for (int again = 0; again < 10; ++again) {
    expect_all_well(leaving_after_the_last_operation_fails_nobody);
    expect_all_well([](Engine&) {});
  }
}

}  // namespace

int main() {
  for (const auto& hosts : kWorlds) try_all(hosts, 8);
  for (const auto& hosts : kDeepWorlds) try_all(hosts, 1);
  return check::report();
}
