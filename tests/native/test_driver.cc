// The driver alone, with scripted work: a waiting thread makes progress, the driver's thread does when no thread waits,
// and listeners are called without a lock.
#include <chrono>
#include <latch>
#include <thread>

#include "base/clock.h"
#include "check.h"
#include "engine/driver.h"
#include "engine_parts.h"

using namespace farandole;
using namespace std::chrono_literals;

namespace {

// A driver of one rank. Its work completes every pending operation that is due.
struct Fixture {
  Fixture() : wiring(std::move(ranks::wire({0})[0])), driver(wiring, 10us, false, pending, work) {}

  OperationPtr add(const std::string& name, const Listener& listener = {}) {
    OperationPtr made = ranks::operation(Kind::Barrier, name, DType::UInt8, {}, nullptr, nullptr);
    made->listener = listener;
    pending.add({&made, 1});
    return made;
  }

  bool complete_all() {
    const std::vector<OperationPtr> all = pending.take_all();
    static_cast<void>(pending.drain());
    for (const OperationPtr& each : all) driver.complete(each);
    return !all.empty();
  }

  Wiring wiring;
  Pending pending;
  parts::ScriptedWork work;
  Driver driver;
};

void test_waiting_thread_drives() {
  Fixture fixture;
  const OperationPtr operation = fixture.add("x");
  int steps = 0;
  std::thread::id driven_by;
  fixture.work.on_progress = [&] {
    driven_by = std::this_thread::get_id();
    CHECK(!fixture.driver.is_in_background());
    return ++steps == 300 ? fixture.complete_all() : false;
  };
  CHECK(fixture.driver.wait(*operation, 20s));
  CHECK_EQ(steps, 300);
  CHECK(driven_by == std::this_thread::get_id());
  CHECK(fixture.work.checks > 0);  // of lost peers, while nothing moved
  CHECK(fixture.driver.waited_ns() > 0);
}

void test_wait_ends_at_its_limit() {
  Fixture fixture;
  const OperationPtr never = fixture.add("never");
  const auto begin = std::chrono::steady_clock::now();
  CHECK(!fixture.driver.wait(*never, 50ms));
  const auto took = std::chrono::steady_clock::now() - begin;
  CHECK(took >= 50ms && took < 10s);
  CHECK(fixture.work.armed > 0);     // before each sleep
  CHECK(fixture.driver.try_lock());  // a thread whose wait timed out holds no lock
}

void test_own_thread_drives_for_listeners() {
  Fixture fixture;
  struct Heard {
    Fixture& fixture;
    std::thread::id by;
    std::latch over{1};
  } heard{fixture, {}};
  std::atomic<bool> in_background{false};
  fixture.work.on_progress = [&] {
    in_background = fixture.driver.is_in_background();
    return fixture.complete_all();
  };
  fixture.driver.start();
  Listener listener;
  listener.cookie = &heard;
  listener.done = [](void* cookie, Operation& done) noexcept {
    auto& self = *static_cast<Heard*>(cookie);
    CHECK(done.done());
    CHECK(self.fixture.driver.try_lock());  // the listener may wait for another operation
    self.by = std::this_thread::get_id();
    self.over.count_down();
  };
  fixture.add("x", listener);
  fixture.driver.wake(1);
  heard.over.wait();
  CHECK(in_background);
  CHECK(heard.by != std::this_thread::get_id());
  fixture.driver.stop(fixture.driver.take_over(now_ns()));
  CHECK(fixture.driver.is_stopping());
}

void test_one_of_two_waiters_drives() {
  Fixture fixture;
  std::atomic<int> inside{0};
  const OperationPtr first = fixture.add("first");
  const OperationPtr second = fixture.add("second");
  std::atomic<int> waiting{0};
  fixture.work.on_progress = [&] {
    CHECK_EQ(++inside, 1);
    std::this_thread::yield();
    --inside;
    return waiting.load() == 2 ? fixture.complete_all() : false;
  };
  std::thread other([&] {
    ++waiting;
    CHECK(fixture.driver.wait(*second, 20s));
  });
  ++waiting;
  CHECK(fixture.driver.wait(*first, 20s));
  other.join();
}

void test_errors_are_said_in_the_jobs_ranks() {
  Fixture fixture;
  fixture.wiring.members = {7};
  fixture.wiring.process_set = "evens";
  const OperationPtr operation = fixture.add("x");
  fixture.driver.fail(operation, Error::peer_lost("", 0, "it failed"));
  CHECK(operation->done());
  CHECK_EQ(operation->error->rank, 7);
  CHECK_EQ(operation->error->name, std::string("x"));
}

// The driving thread is inside a collective, which checks whether it must stop.
void test_take_over_stops_a_running_collective() {
  Fixture fixture;
  const OperationPtr operation = fixture.add("x");
  std::latch begun(1);
  std::atomic<bool> entered{false};
  fixture.work.on_progress = [&] {
    if (!entered.exchange(true)) begun.count_down();
    while (!fixture.driver.is_stopping()) std::this_thread::sleep_for(1ms);
    return fixture.complete_all();
  };
  std::thread waiter([&] { CHECK(fixture.driver.wait(*operation, 20s)); });
  begun.wait();
  {
    const Driver::Lock taken = fixture.driver.take_over(now_ns() + 20'000'000);
    CHECK(taken.owns_lock());
    CHECK(fixture.driver.is_stopping());
  }
  waiter.join();
}

void test_take_over_of_an_idle_driver_stops_nothing() {
  Fixture fixture;
  const Driver::Lock taken = fixture.driver.take_over(now_ns());
  CHECK(taken.owns_lock());
  CHECK(!fixture.driver.is_stopping());
}

// At shutdown the driver's thread may wait for the lock. It must not run a plan whose operations have failed.
void test_stop_comes_before_the_lock_is_free() {
  Fixture fixture;
  std::latch begun(1);
  std::atomic<int> steps{0}, late{0};
  fixture.work.on_progress = [&] {
    if (steps++ == 0) begun.count_down();
    if (fixture.driver.is_stopping()) ++late;
    return false;
  };
  fixture.driver.start();
  fixture.add("x");
  fixture.driver.wake(1);
  begun.wait();
  Driver::Lock taken = fixture.driver.take_over(now_ns() + 20'000'000'000);
  const int before = steps;
  std::this_thread::sleep_for(5ms);  // the thread waits for the lock by then
  fixture.driver.stop(std::move(taken));
  CHECK_EQ(steps.load(), before);
  CHECK_EQ(late.load(), 0);
}

}  // namespace

int main() {
  test_waiting_thread_drives();
  test_wait_ends_at_its_limit();
  test_own_thread_drives_for_listeners();
  test_one_of_two_waiters_drives();
  test_errors_are_said_in_the_jobs_ranks();
  test_take_over_stops_a_running_collective();
  test_take_over_of_an_idle_driver_stops_nothing();
  test_stop_comes_before_the_lock_is_free();
  return check::report();
}
