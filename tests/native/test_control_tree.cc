// The control trees of some ranks, run by one thread: requests up, plans down, and announcements of ranks that leave or
// fail.
#include <memory>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "engine/control_tree.h"
#include "engine_ranks.h"

using namespace farandole;
using ranks::operation;

namespace {

// One rank: its requests and its place in the tree.
struct Rank {
  Rank(Wiring given, const EngineOptions& options)
      : wiring(std::move(given)), control(wiring, options, pending, trace) {}

  void submit(const OperationPtr& operation) {
    pending.add({&operation, 1});
    control.send_requests();
    control.forward();
    control.flush();
  }

  void move() {
    control.receive();
    control.decide();
    control.forward();
    control.flush();
  }

  Wiring wiring;
  Trace trace;
  Pending pending;
  ControlTree control;
};

using Ranks = std::vector<std::unique_ptr<Rank>>;

Ranks make(const std::vector<int>& hosts, EngineOptions options = ranks::options()) {
  Ranks made;
  for (Wiring& wiring : ranks::wire(hosts, 1)) made.push_back(std::make_unique<Rank>(std::move(wiring), options));
  return made;
}

// Delivers all messages to all ranks.
void exchange_messages(const Ranks& all) {
  for (size_t round = 0; round < 4 * all.size(); ++round)
    for (const auto& rank : all) rank->move();
}

OperationPtr barrier(const std::string& name) {
  return operation(Kind::Barrier, name, DType::UInt8, {}, nullptr, nullptr);
}

const Bucket& bucket_of(const AgreedPlan& agreed, size_t at = 0) { return std::get<Bucket>(agreed.plan.at(at)); }

void test_all_ranks_hear_the_same_plan(const std::vector<int>& hosts) {
  const Ranks all = make(hosts);
  for (size_t rank = 1; rank < all.size(); ++rank) all[rank]->submit(barrier("x"));
  exchange_messages(all);
  for (const auto& rank : all) CHECK(!rank->control.has_plans());  // rank 0 has not made the request
  all[0]->submit(barrier("x"));
  exchange_messages(all);
  for (const auto& rank : all) {
    const auto agreed = rank->control.next_plan();
    CHECK(agreed.has_value());
    if (!agreed) continue;
    CHECK_EQ(bucket_of(*agreed).entries.at(0).name, std::string("x"));
    CHECK_EQ(rank->pending.take(bucket_of(*agreed).entries[0])->request.name, std::string("x"));
    CHECK(!rank->control.next_plan());
    CHECK_EQ(rank->control.request_counts().in_full, uint64_t{1});
  }
  // The second time, the request is a number.
  for (const auto& rank : all) rank->submit(barrier("x"));
  exchange_messages(all);
  for (const auto& rank : all) {
    const auto agreed = rank->control.next_plan();
    CHECK(agreed && bucket_of(*agreed).entries.at(0).is_number());
    CHECK_EQ(rank->control.request_counts().by_number, uint64_t{1});
  }
}

void test_knobs_go_with_the_next_bucket() {
  const Ranks all = make({0, 0, 0});
  Knobs wanted;
  wanted.slot_bytes = 8192;
  all[0]->control.turn(wanted, true);
  CHECK(all[0]->control.is_turning());
  exchange_messages(all);
  for (const auto& rank : all) CHECK(!rank->control.has_plans());
  for (const auto& rank : all) rank->submit(barrier("x"));
  exchange_messages(all);
  for (const auto& rank : all) {
    const auto agreed = rank->control.next_plan();
    CHECK(agreed && std::get<Knobs>(agreed->plan.at(0)) == wanted);
    CHECK(agreed && agreed->paced == rank->wiring.is_coordinator());
  }
  CHECK(!all[0]->control.is_turning());
  CHECK(CHECK_THROWS(Error, all[1]->control.turn(wanted, false)).kind == ErrorKind::Invalid);
  wanted.link_chunk = 100;
  CHECK(CHECK_THROWS(Error, all[0]->control.turn(wanted, false)).kind == ErrorKind::Invalid);
}

// Operations that lack a request of a departed rank are refused on all ranks that requested them; the error names the
// rank.
void test_departure_of_a_leaf() {
  const Ranks all = make({0, 0, 0});
  all[0]->submit(barrier("x"));
  all[1]->submit(barrier("x"));
  exchange_messages(all);
  CHECK(!all[0]->control.has_departures());
  all[0]->control.note_departure(2);
  CHECK(all[0]->control.has_departures());
  all[0]->control.announce_departures();
  CHECK(!all[0]->control.has_departures() && all[0]->control.has_left(2));
  exchange_messages(all);
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto agreed = all[rank]->control.next_plan();
    CHECK(agreed.has_value());
    if (!agreed) continue;
    const auto& refusal = std::get<Refusal>(agreed->plan.at(0));
    CHECK_EQ(refusal.name, std::string("x"));
    CHECK(refusal.error.kind == ErrorKind::PeerLost && refusal.error.rank == 2);
  }
}

// Without its parent a rank has no path to the coordinator: an idle rank continues, a rank with pending operations
// fails.
void test_departure_of_the_parent() {
  const Ranks all = make({0, 0});
  all[1]->control.note_departure(0);
  all[1]->control.announce_departures();
  all[1]->submit(barrier("x"));
  const Error error = CHECK_THROWS(Error, all[1]->control.announce_departures());
  CHECK(error.kind == ErrorKind::PeerLost && error.rank == 0);
  // Rank 0 reports the departure of a rank that is not a neighbour.
  const Ranks three = make({0, 0, 0});
  three[1]->control.note_departure(2);
  CHECK(!three[1]->control.has_departures());
}

// By message, because ranks of other hosts share no life words.
void test_departures_name_the_first_to_leave() {
  const Ranks all = make({0, 1, 2});  // a chain
  for (const size_t rank : {size_t{0}, size_t{1}}) all[rank]->submit(barrier("x"));
  all[2]->control.leave(true, now_ns() + 1'000'000'000);
  exchange_messages(all);
  for (const size_t rank : {size_t{0}, size_t{1}}) {
    const auto agreed = all[rank]->control.next_plan();
    CHECK(agreed && std::get<Refusal>(agreed->plan.at(0)).error.rank == 2);
  }
  CHECK(all[1]->control.has_left(2));
}

void test_failures_are_announced() {
  const Ranks all = make({0, 1});
  CHECK(all[0]->control.has_remote_peers());
  all[1]->control.announce_failure({1, false, "it failed: no memory", -1});
  const Error error = CHECK_THROWS(Error, all[0]->control.receive());
  CHECK(error.kind == ErrorKind::PeerLost && error.rank == 1);
  CHECK_EQ(error.reason, std::string("it failed: no memory"));
  CHECK(all[0]->control.announced() && all[0]->control.announced()->rank == 1);
}

void test_stalls_are_said_in_the_jobs_ranks() {
  EngineOptions options = ranks::options();
  options.stall = std::chrono::milliseconds(1);
  Ranks all = make({0, 0}, options);
  all[0]->wiring.members = {4, 9};
  all[1]->submit(barrier("x"));
  exchange_messages(all);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  exchange_messages(all);
  const auto stalls = all[0]->control.stalls();
  CHECK_EQ(stalls.size(), size_t{1});
  CHECK(stalls.size() == 1 && stalls[0].asked == std::vector<int>{9} && stalls[0].missing == std::vector<int>{4});
}

}  // namespace

int main() {
  const std::vector<std::vector<int>> worlds{{0}, {0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 1, 1, 2}, {0, 1, 2, 3}};
  for (const auto& hosts : worlds) test_all_ranks_hear_the_same_plan(hosts);
  test_knobs_go_with_the_next_bucket();
  test_departure_of_a_leaf();
  test_departure_of_the_parent();
  test_departures_name_the_first_to_leave();
  test_failures_are_announced();
  test_stalls_are_said_in_the_jobs_ranks();
  return check::report();
}
