// The failure detector alone: it finds lost ranks by life words, aborts, sockets and clocks, and poison fails present
// and future operations.
#include <string>
#include <thread>

#include "base/clock.h"
#include "check.h"
#include "engine/failure_detector.h"
#include "engine_parts.h"

using namespace farandole;
using parts::Parts;

namespace {

OperationPtr barrier(const std::string& name) {
  return ranks::operation(Kind::Barrier, name, DType::UInt8, {}, nullptr, nullptr);
}

void die(Segment& segment, int rank) {
  std::thread([&] { segment.area(rank).life.begin(); }).join();  // its thread ends without Life::end()
}

void test_a_dead_rank_is_found() {
  const auto all = parts::make({0, 0, 0});
  CHECK(!all[0]->failures.find_lost());
  all[0]->failures.require_alive();
  die(*all[0]->wiring.segment, 2);
  const auto lost = all[0]->failures.find_lost();
  CHECK(lost && lost->kind == ErrorKind::PeerLost && lost->rank == 2);
  CHECK_EQ(CHECK_THROWS(Error, (all[1]->failures.require_alive(), 0)).rank, 2);
}

void test_a_rank_that_left_is_not_lost() {
  const auto all = parts::make({0, 0});
  std::thread([&] {
    Life& life = all[0]->wiring.segment->area(1).life;
    life.begin();
    life.end();
  }).join();
  CHECK(!all[0]->failures.find_lost());
  CHECK(all[0]->control.has_departures());
}

// A data link to a rank that has left may hang up while another rank's data is awaited. No rank above leaves here.
void test_all_ranks_know_which_ranks_left() {
  const auto all = parts::make({0, 1, 2, 3, 3});
  for (const int gone : {1, 2}) {
    all[static_cast<size_t>(gone)]->control.leave(true, now_ns() + 1'000'000'000);
    for (int round = 0; round < 4; ++round)
      for (const size_t rank : {size_t{0}, size_t{3}, size_t{4}}) all[rank]->failures.check();
    for (const size_t rank : {size_t{0}, size_t{3}, size_t{4}})
      check::that(all[rank]->failures.has_left(gone), "it knows", std::to_string(rank));
  }
}

void test_the_end_of_a_connection_is_found() {
  auto all = parts::make({0, 1});
  CHECK(!all[0]->failures.find_lost());
  all[1].reset();  // without a departure
  all[0]->control.receive();
  const auto lost = all[0]->failures.find_lost();
  CHECK(lost && lost->kind == ErrorKind::PeerLost && lost->rank == 1);
  CHECK_EQ(CHECK_THROWS(Error, (all[0]->failures.check(), 0)).rank, 1);
}

void test_poison_ends_everything_once() {
  const auto all = parts::make({0, 0});
  Parts& first = *all[0];
  const OperationPtr pending = barrier("x");
  first.add(pending);
  first.failures.poison(Error::peer_lost("", 1, "it failed"));
  first.failures.poison(Error::internal("too late"));
  CHECK(first.failures.has_failed());
  CHECK(pending->done() && pending->error && pending->error->rank == 1 && pending->error->name == "x");
  const Error later = CHECK_THROWS(Error, (first.add(barrier("y")), 0));
  CHECK(later.kind == ErrorKind::PeerLost && later.rank == 1);
  // The other rank of the host reads the abort in the segment, in and between collectives.
  for (const Error& heard : {CHECK_THROWS(Error, (all[1]->failures.check(), 0)),
                             CHECK_THROWS(Error, (void(all[1]->failures.find_lost()), 0))}) {
    CHECK(heard.kind == ErrorKind::PeerLost && heard.rank == 1);
    CHECK_EQ(heard.reason, std::string("it failed"));
  }
}

void test_poison_is_told_to_other_hosts() {
  const auto all = parts::make({0, 1});
  all[1]->failures.poison(Error::internal("no memory"));
  const Error heard = CHECK_THROWS(Error, all[0]->control.receive());
  CHECK(heard.kind == ErrorKind::PeerLost && heard.rank == 1);
  check::that(heard.reason.starts_with("it failed: "), "the reason is told", heard.reason);
}

// A connection may break because its other end has failed over a third rank.
void test_the_root_cause_is_named() {
  const auto all = parts::make({0, 0, 0});
  const Error broken = Error::peer_lost("", 1, "its connection broke");
  CHECK_EQ(all[0]->failures.root_cause(broken).rank, 1);
  const Error other = Error::internal("no memory");
  CHECK(all[0]->failures.root_cause(other).kind == ErrorKind::Internal);
  die(*all[0]->wiring.segment, 2);
  CHECK_EQ(all[0]->failures.root_cause(broken).rank, 2);
  all[1]->failures.poison(Error::peer_lost("", 1, "it failed"));
  CHECK_EQ(all[0]->failures.root_cause(broken).rank, 1);

  const auto hosts = parts::make({0, 1});
  hosts[1]->failures.poison(Error::timeout("x", {1}, 2));
  const Error late = hosts[0]->failures.root_cause(broken);
  check::that(late.reason.starts_with("it did not do its part"), "what the peer announced", late.reason);
}

void test_timeouts() {
  const auto all = parts::make({0, 0}, ranks::options(0.01));
  FailureDetector& failures = all[0]->failures;
  failures.check();  // no operation runs
  const uint64_t now = now_ns();
  failures.start_timeout(now);
  failures.check();
  failures.start_timeout(now - 100'000'000);
  failures.check();  // late: another host may name the rank first
  failures.start_timeout(now - 2'000'000'000);
  CHECK(CHECK_THROWS(Error, (failures.check(), 0)).kind == ErrorKind::Timeout);
}

// Each rank's own deadline may pass at another moment. The first rank that notices is no more to blame than the others.
void test_a_timeout_without_a_culprit_blames_nobody() {
  const auto all = parts::make({0, 0, 1}, ranks::options(2));
  all[0]->failures.poison(Error::timeout("x", {}, 2));
  const Error near = CHECK_THROWS(Error, (all[1]->failures.check(), 0));
  const Error far = CHECK_THROWS(Error, all[2]->control.receive());
  for (const Error& heard : {near, far}) {
    CHECK(heard.kind == ErrorKind::Timeout && heard.ranks.empty());
    CHECK_EQ(heard.waited, 2.0);
  }
  all[2]->failures.poison(far);  // and so on to further hosts
  CHECK(CHECK_THROWS(Error, (all[2]->failures.check(), 0)).kind == ErrorKind::Timeout);
  const Error broken = Error::peer_lost("", 0, "its connection broke");
  CHECK(all[2]->failures.root_cause(broken).kind == ErrorKind::Timeout);
}

void test_a_silent_coordinator_is_overdue() {
  const auto all = parts::make({0, 0}, ranks::options(0.01));
  const OperationPtr operation = barrier("x");
  operation->submitted_ns = now_ns();
  all[1]->add(operation);
  CHECK(!all[1]->failures.find_lost());
  const auto more = parts::make({0, 0}, ranks::options(0.01));
  operation->submitted_ns = 1;
  more[1]->add(operation);
  const Error error = CHECK_THROWS(Error, more[1]->failures.find_lost());
  CHECK(error.kind == ErrorKind::Timeout && error.name == "x" && error.ranks == std::vector<int>{0});
}

void test_shutdown_ends_a_collective() {
  const auto all = parts::make({0, 0});
  all[0]->driver.start();
  all[0]->driver.stop(all[0]->driver.take_over(now_ns()));
  CHECK(CHECK_THROWS(Error, (all[0]->failures.check(), 0)).kind == ErrorKind::Closed);
}

}  // namespace

int main() {
  test_a_dead_rank_is_found();
  test_a_rank_that_left_is_not_lost();
  test_all_ranks_know_which_ranks_left();
  test_the_end_of_a_connection_is_found();
  test_poison_ends_everything_once();
  test_poison_is_told_to_other_hosts();
  test_the_root_cause_is_named();
  test_timeouts();
  test_a_timeout_without_a_culprit_blames_nobody();
  test_a_silent_coordinator_is_overdue();
  test_shutdown_ends_a_collective();
  return check::report();
}
