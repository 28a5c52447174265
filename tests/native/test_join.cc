// Joined ranks take part in the operations of the other ranks, and change no results.
#include <atomic>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "engine/collector.h"
#include "engine/joined.h"
#include "engine/negotiator.h"
#include "engine_ranks.h"

using namespace ranks;
using farandole::Bucket;
using farandole::CollectedRequests;
using farandole::Collector;
using farandole::Entry;
using farandole::ErrorKind;
using farandole::FullRequest;
using farandole::Negotiator;
using farandole::NumberRange;
using farandole::Plan;
using farandole::Refusal;
using farandole::Request;

namespace {

Request request_of(const std::string& name, Kind kind = Kind::Allreduce) {
  Request request;
  request.name = name;
  request.kind = kind;
  request.dtype = DType::Float32;
  request.shape = {4};
  request.cacheable = kind != Kind::Join;
  return request;
}

Request join_request() {
  Request request = request_of("join", Kind::Join);
  request.shape.clear();
  return request;
}

const Bucket& only_bucket(const Plan& plan) {
  if (plan.size() != 1 || !std::holds_alternative<Bucket>(plan[0])) throw Error::internal("not one bucket");
  return std::get<Bucket>(plan[0]);
}

const Refusal& only_refusal(const Plan& plan) {
  if (plan.size() != 1 || !std::holds_alternative<Refusal>(plan[0])) throw Error::internal("not one refusal");
  return std::get<Refusal>(plan[0]);
}

void test_who_has_joined_counts_as_asking() {
  Negotiator negotiator({.size = 3});
  negotiator.add(2, join_request(), 0);
  CHECK(negotiator.decide(0).empty());
  negotiator.add(0, request_of("x"), 0);
  CHECK(negotiator.decide(0).empty());
  negotiator.add(1, request_of("x"), 0);
  const Plan plan = negotiator.decide(0);
  const Entry& entry = only_bucket(plan).entries[0];
  CHECK_EQ(entry.name, std::string("x"));
  CHECK(entry.request == request_of("x"));
  CHECK_EQ(entry.id, farandole::kNoId);
}

void test_what_waited_for_the_one_that_joins_runs_then() {
  Negotiator negotiator({.size = 2});
  negotiator.add(0, request_of("b"), 0);
  negotiator.add(0, request_of("a"), 0);
  CHECK(negotiator.decide(0).empty());
  negotiator.add(1, join_request(), 0);
  const Plan plan = negotiator.decide(0);
  CHECK_EQ(only_bucket(plan).entries.size(), 2U);
  CHECK_EQ(negotiator.waiting(), 1U);  // the join
}

void test_the_last_one_is_named_and_then_all_is_as_before() {
  Negotiator negotiator({.size = 3});
  for (int round = 0; round < 3; ++round) {
    for (const int rank : {2, 0}) negotiator.add(rank, join_request(), 0);
    CHECK(negotiator.decide(0).empty());
    negotiator.add(1, join_request(), 0);
    const Plan plan = negotiator.decide(0);
    CHECK(only_bucket(plan).kind == Kind::Join);
    CHECK(only_bucket(plan).entries[0].sizes == std::vector<int64_t>{1});
    CHECK_EQ(negotiator.waiting(), 0U);
    negotiator.add(0, request_of("x"), 0);
    negotiator.add(1, request_of("x"), 0);
    CHECK(negotiator.decide(0).empty());  // rank 2 has not made the request
    negotiator.add(2, request_of("x"), 0);
    CHECK(!only_bucket(negotiator.decide(0)).entries[0].request);
  }
  check::thrown<Error>([&] {
    negotiator.add(0, join_request(), 0);
    negotiator.add(0, join_request(), 0);
  });
}

void test_numbers_are_looked_at_one_by_one() {
  Negotiator negotiator({.size = 2});
  for (int rank = 0; rank < 2; ++rank) negotiator.add(rank, request_of("x"), 0);
  const uint32_t id = only_bucket(negotiator.decide(0)).entries[0].id;
  negotiator.add(0, id, 0);
  negotiator.add(1, join_request(), 0);  // earlier requests by number count as well
  for (int again = 0; again < 2; ++again) {
    const Plan plan = negotiator.decide(0);
    CHECK(only_bucket(plan).entries[0].request == request_of("x"));
    if (again == 0) negotiator.add(0, id, 0);
  }
  negotiator.add(0, join_request(), 0);
  CHECK(only_bucket(negotiator.decide(0)).kind == Kind::Join);
  negotiator.add(0, id, 0);
  negotiator.add(1, id, 0);
  const Plan plan = negotiator.decide(0);
  CHECK_EQ(only_bucket(plan).entries[0].id, id);  // the number is still valid
  CHECK(!only_bucket(plan).entries[0].request);
}

void test_what_cannot_be_is_refused() {
  Negotiator negotiator({.size = 2, .members = {4, 5}});
  negotiator.add(1, join_request(), 0);
  Request broadcast = request_of("broadcast", Kind::Broadcast);
  broadcast.root = 1;
  Request alltoall = request_of("alltoall", Kind::Alltoall);
  alltoall.splits = {3, 1};
  for (const Request& each : {request_of("scatter", Kind::Reducescatter), broadcast, alltoall}) {
    negotiator.add(0, each, 0);
    const Plan plan = negotiator.decide(0);
    const Error& error = only_refusal(plan).error;
    CHECK(error.kind == ErrorKind::Joined);
    CHECK(error.reason.find("is not supported with Join at this time") != std::string::npos);
    CHECK(error.reason.find("rank 5 has joined") != std::string::npos);  // the job's number
    CHECK_EQ(error.name, each.name);
  }
  broadcast.root = 0;
  alltoall.splits = {3, 0};
  for (const Request& each : {broadcast, alltoall, request_of("gather", Kind::Allgather)}) {
    negotiator.add(0, each, 0);
    CHECK_EQ(only_bucket(negotiator.decide(0)).entries[0].name, each.name);
  }
}

void test_joined_and_other_operations_are_not_fused() {
  Negotiator negotiator({.size = 2});
  negotiator.add(0, request_of("both"), 0);
  negotiator.add(1, request_of("both"), 0);
  negotiator.add(0, request_of("one"), 0);
  negotiator.add(1, join_request(), 0);
  CHECK_EQ(negotiator.decide(0).size(), 2U);
}

void test_losses_and_time() {
  farandole::RankSet leaver;
  leaver.add(0);
  Negotiator left({.size = 3});
  left.add(1, join_request(), 0);
  left.leave(leaver, 0, "it has shut down");
  Plan plan = left.decide(0);
  CHECK(only_refusal(plan).error.kind == ErrorKind::PeerLost);
  CHECK_EQ(only_refusal(plan).error.rank, 0);
  left.add(2, join_request(), 0);  // later joins get the same error
  plan = left.decide(0);
  CHECK(only_refusal(plan).error.kind == ErrorKind::PeerLost);

  Negotiator late({.size = 3, .timeout = 10});
  late.add(1, join_request(), 0);
  for (int step = 1; step < 5; ++step) {  // the others work: a joined rank waits for that
    late.add(0, request_of("x"), 6.0 * step);
    late.add(2, request_of("x"), 6.0 * step);
    CHECK_EQ(only_bucket(late.decide(6.0 * step)).entries.size(), 1U);
  }
  CHECK(late.decide(33).empty());
  plan = late.decide(35);
  CHECK(only_refusal(plan).error.kind == ErrorKind::Timeout);
  CHECK(only_refusal(plan).error.ranks == (std::vector<int>{0, 2}));
}

void test_timeouts_do_not_blame_who_has_joined() {
  Negotiator negotiator({.size = 3, .timeout = 10});
  negotiator.add(1, join_request(), 0);
  negotiator.add(0, request_of("x"), 1);
  for (const auto& item : negotiator.decide(20)) {
    const Error& error = std::get<Refusal>(item).error;
    if (error.name == "x") CHECK(error.ranks == std::vector<int>{2});
  }
}

void test_a_collector_holds_nothing_back_for_who_has_joined() {
  Collector collector(1, {2, 3}, 100);
  const auto learn = [&](const std::string& name, uint32_t id) {
    collector.learn({Bucket{Kind::Allreduce, {Entry{name, id, {}}}}});
  };
  learn("x", 0);
  learn("y", 1);
  collector.add(2, {NumberRange{farandole::kSender, true, 0, 1}}, 0);
  CHECK(collector.drain(0).empty());
  collector.add(3, {FullRequest{3, join_request()}}, 0);
  const CollectedRequests up = collector.drain(0);
  CHECK_EQ(up.size(), 2U);  // held requests, then the join
  CHECK(std::holds_alternative<NumberRange>(up[0]) && std::get<NumberRange>(up[0]).rank == 2);
  collector.add(2, {NumberRange{farandole::kSender, true, 1, 1}}, 0);
  CHECK_EQ(collector.drain(0).size(), 1U);
  collector.learn({Bucket{Kind::Allreduce, {Entry{"x", farandole::kNoId, {}}}}});
  collector.learn({Bucket{Kind::Allreduce, {Entry{"y", farandole::kNoId, {}}}}});
  collector.learn({Bucket{Kind::Join, {Entry{"join", farandole::kNoId, {3}}}}});
  for (const int child : {2, 3}) collector.add(child, {NumberRange{farandole::kSender, true, 0, 1}}, 0);
  CHECK(collector.drain(0).empty());  // normal operation again
  collector.add({uint32_t{0}}, 0);
  CHECK(collector.drain(0) == (CollectedRequests{NumberRange{farandole::kSender, true, 0, 1}}));
}

// The same with engines, over every wiring. Rank r has r + 1 steps of data.

const std::vector<std::vector<int>> kWorlds = {{0},    {0, 0},    {0, 0, 0},    {0, 0, 0, 0},
                                               {0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 1}};

int join(Engine& engine) {
  const OperationPtr operation = ranks::operation(Kind::Join, "join", DType::UInt8, {}, nullptr, nullptr);
  operation->request.cacheable = false;
  run_now(engine, operation);
  return operation->last_joined;
}

/// The input of a rank in a step.
float value_of(int rank, int step) { return static_cast<float>(rank + 2) * static_cast<float>(step + 1); }

void reduce_at(Engine& engine, int step, size_t count) {
  const std::string name = "x" + std::to_string(count);
  std::vector<float> values(count, value_of(engine.rank(), step));
  run_now(engine, sum(name, values));
  float expected = 0;
  for (int rank = step; rank < engine.size(); ++rank) expected += value_of(rank, step);
  check::equal(values.back(), expected, name);

  values.assign(count, value_of(engine.rank(), step));
  OperationPtr least = sum("min" + name, values);
  least->request.op = ReduceOp::Min;
  least->request.prescale = -2;  // reverses the order
  run_now(engine, least);
  check::equal(values.front(), -2 * value_of(engine.size() - 1, step), name);

  std::vector<int64_t> whole(count, engine.rank() + 2);
  const OperationPtr product = operation(Kind::Allreduce, "product" + name, DType::Int64, {static_cast<int64_t>(count)},
                                         whole.data(), whole.data());
  product->request.op = ReduceOp::Product;
  product->request.prescale = 1.5;
  run_now(engine, product);
  int64_t multiplied = 1;
  for (int rank = step; rank < engine.size(); ++rank) multiplied *= (rank + 2) * 3 / 2;
  check::equal(whole.back(), multiplied, name);

  values.assign(count, 4.0f);
  OperationPtr combined = sum("adasum" + name, values);
  combined->request.op = ReduceOp::Adasum;
  run_now(engine, combined);
  check::equal(values.back(), 4.0f, name);
}

void move_at(Engine& engine, int step) {
  std::vector<float> rows(static_cast<size_t>(engine.rank()) + 1, static_cast<float>(engine.rank()));
  const OperationPtr gathered =
      operation(Kind::Allgather, "gather", DType::Float32, {static_cast<int64_t>(rows.size())}, rows.data(), nullptr);
  run_now(engine, gathered);
  int64_t expected = 0;
  for (int rank = step; rank < engine.size(); ++rank) expected += rank + 1;
  check::equal(gathered->result_shape[0], expected);
  check::equal(*reinterpret_cast<const float*>(gathered->result->data()), static_cast<float>(step));

  std::vector<float> values(100, static_cast<float>(engine.rank()));
  const OperationPtr spread = operation(Kind::Broadcast, "spread", DType::Float32, {100}, values.data(), values.data());
  spread->request.root = engine.size() - 1;
  run_now(engine, spread);
  check::equal(values.back(), static_cast<float>(engine.size() - 1));

  const auto n = static_cast<size_t>(engine.size());
  const OperationPtr sent = operation(Kind::Alltoall, "sent", DType::Float32, {100}, values.data(), nullptr);
  sent->request.splits.assign(n, 0);
  for (size_t rank = static_cast<size_t>(step); rank < n; ++rank) sent->request.splits[rank] = 2;
  run_now(engine, sent);
  check::equal(sent->result_shape[0], static_cast<int64_t>(2 * (n - static_cast<size_t>(step))));

  run_now(engine, operation(Kind::Barrier, "barrier", DType::UInt8, {}, nullptr, nullptr));
}

void uneven_data(Engine& engine) {
  for (int round = 0; round < 3; ++round) {
    for (int step = 0; step <= engine.rank(); ++step) {
      for (const size_t count : {size_t{3}, size_t{70'000}}) reduce_at(engine, step, count);
      move_at(engine, step);
    }
    const int last = join(engine);
    check::equal(last, engine.size() - 1);
    std::vector<float> values(7, 1.0f);  // normal operation again
    run_now(engine, sum("between", values));
    check::equal(values[3], static_cast<float>(engine.size()));
  }
}

void in_flight_when_joining(Engine& engine) {
  std::vector<std::vector<float>> values(20, std::vector<float>(50, 1.0f));
  std::vector<OperationPtr> asked;
  const size_t mine = engine.rank() % 2 == 0 ? values.size() : values.size() / 2;
  for (size_t i = 0; i < mine; ++i) {
    asked.push_back(sum("t" + std::to_string(i), values[i]));
    asked.back()->request.op = ReduceOp::Average;
    engine.submit(asked.back(), true);
  }
  join(engine);
  const float half = static_cast<float>((engine.size() + 1) / 2) / static_cast<float>(engine.size());
  for (size_t i = 0; i < mine; ++i) {
    finish(engine, asked[i]);
    // Half of the tensors come from every second rank only, and the divisor is still the number of all ranks.
    check::that(std::abs(values[i][0] - (i < values.size() / 2 ? 1.0f : half)) < 1e-6f, "the average is of all ranks");
  }
}

void refused_while_joined(Engine& engine, std::atomic<bool>& refused) {
  if (engine.size() == 1) return;
  std::vector<float> values(static_cast<size_t>(engine.size()), 1.0f);
  if (engine.rank() == 0) {
    const OperationPtr joining = ranks::operation(Kind::Join, "join", DType::UInt8, {}, nullptr, nullptr);
    joining->request.cacheable = false;
    engine.submit(joining, true);
    const Error error = check::thrown<Error>([&] { engine.submit(sum("x", values), true); });
    check::that(error.kind == ErrorKind::Invalid, "error.kind == Invalid", error.what());
    refused = true;
    finish(engine, joining);
    return;
  }
  const OperationPtr scattered = operation(Kind::Reducescatter, "scatter", DType::Float32,
                                           {static_cast<int64_t>(values.size())}, values.data(), nullptr);
  const Error error = check::thrown<Error>([&] { run_now(engine, scattered); });
  check::that(error.reason.find("Reducescatter is not supported with Join at this time") != std::string::npos,
              "the refusal says why", error.what());
  run_now(engine, sum("x", values));
  check::equal(values[0], static_cast<float>(engine.size() - 1));
  while (!refused) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the last join ends that of rank 0
  join(engine);
}

void leaver_fails_the_join(Engine& engine) {
  if (engine.rank() == engine.size() - 1) return;  // the destructor leaves
  const Error error = check::thrown<Error>([&] { join(engine); });
  check::that(error.kind == ErrorKind::PeerLost, "error.kind == PeerLost", error.what());
}

void nobody_else_joins(Engine& engine, std::atomic<bool>& failed) {
  if (engine.size() == 1) return;
  if (engine.rank() == 1) {
    const Error error = check::thrown<Error>([&] { join(engine); });
    check::that(error.kind == ErrorKind::Timeout, "error.kind == Timeout", error.what());
    check::equal(error.ranks.size(), static_cast<size_t>(engine.size() - 1));
    failed = true;
  } else {
    while (!failed) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  run_now(engine, operation(Kind::Barrier, "end", DType::UInt8, {}, nullptr, nullptr));
}

// While a rank has joined, no rank waits for it in the lane.
void test_the_lane_is_closed_meanwhile() {
  const auto segment = Segment::create(2, 16 << 10, false);
  farandole::Lane lane(*segment, 0, farandole::WaitPolicy{std::chrono::milliseconds(1)});
  segment->lane().suspend();
  const auto never = []() -> bool { throw Error::internal("it waits in the lane"); };
  CHECK(!lane.agree({0, 0, 0, {}, never, [] {}}));
  CHECK(!segment->lane().occupied(0));
  segment->lane().resume();
  CHECK(!lane.agree({0, 0, 0, {}, [] { return true; }, [] {}}));
  CHECK(segment->lane().state(0, 2) == farandole::LaneRounds::State::Spoiled);  // the join spoiled the round
}

}  // namespace

int main() {
  test_who_has_joined_counts_as_asking();
  test_what_waited_for_the_one_that_joins_runs_then();
  test_the_last_one_is_named_and_then_all_is_as_before();
  test_numbers_are_looked_at_one_by_one();
  test_what_cannot_be_is_refused();
  test_joined_and_other_operations_are_not_fused();
  test_losses_and_time();
  test_timeouts_do_not_blame_who_has_joined();
  test_a_collector_holds_nothing_back_for_who_has_joined();
  test_the_lane_is_closed_meanwhile();
  for (const auto& hosts : kWorlds) {
    for (const auto& body : {uneven_data, in_flight_when_joining})
      for (const std::string& problem : run(hosts, body)) check::equal(problem, std::string());
    std::atomic<bool> refused = false;
    const auto refuse = [&refused](Engine& engine) { refused_while_joined(engine, refused); };
    for (const std::string& problem : run(hosts, refuse)) check::equal(problem, std::string());
    if (hosts.size() == 1) continue;
    for (const std::string& problem : run(hosts, leaver_fails_the_join)) check::equal(problem, std::string());
    std::atomic<bool> failed = false;
    const auto nobody_else = [&failed](Engine& engine) { nobody_else_joins(engine, failed); };
    for (const std::string& problem : run(hosts, nobody_else, 0.6)) check::equal(problem, std::string());
  }
  return check::report();
}
