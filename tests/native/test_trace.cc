// What the timeline is made of: events with the engine's clock, named though they carry no names, none from before its
// start and none without being counted.
#include <array>
#include <memory>
#include <string>

#include "base/clock.h"
#include "check.h"
#include "engine/trace.h"

using namespace farandole;

namespace {

OperationPtr operation(const std::string& name) {
  auto made = std::make_shared<Operation>();
  made->request.name = name;
  made->request.shape = {3};
  made->request.dtype = DType::Float32;
  return made;
}

bool within(uint64_t at, uint64_t from, uint64_t to) {
  constexpr uint64_t kError = 2'000;  // two clocks are read after each other, and a thread may be interrupted between
  return at + kError >= from && at <= to + kError;
}

void test_events() {
  Trace trace;
  const std::array operations{operation("first"), operation("second")};
  trace.add(Kind::Allreduce, operations, trace.now());
  CHECK(trace.drain().empty());

  trace.start(true);
  for (int time = 0; time < 3; ++time) {
    const uint64_t asked = now_ns();
    operations[0]->submitted_ticks = trace.now();
    const uint64_t begin = now_ns();
    trace.add_plan(1);
    const uint64_t begun = trace.now();
    while (now_ns() < begin + 3'000'000) {
    }
    trace.add(Kind::Allreduce, operations, begun);
    const uint64_t end = now_ns();

    const auto events = trace.drain();
    CHECK_EQ(events.size(), size_t{4});
    CHECK_EQ(events[0].phase, std::string("plan"));
    CHECK_EQ(events[0].bytes, uint64_t{1});
    CHECK_EQ(events[1].name + " " + events[1].phase, std::string("first negotiate"));
    CHECK(within(events[1].begin_ns, asked, begin));
    CHECK_EQ(events[1].end_ns, events[2].begin_ns);
    CHECK_EQ(events[2].name + " " + events[2].phase, "first " + std::string(name_of(Kind::Allreduce)));
    CHECK(within(events[2].begin_ns, begin, begin + 1'000'000));
    CHECK(within(events[2].end_ns, begin + 3'000'000, end));
    CHECK_EQ(events[2].bytes, uint64_t{12});
    CHECK_EQ(events[3].name, std::string("second"));
  }
}

void test_start_and_stop() {
  Trace trace;
  const std::array operations{operation("early")};
  trace.start(false);
  operations[0]->submitted_ticks = trace.now();
  const uint64_t begun = trace.now();
  trace.add(Kind::Broadcast, operations, begun);
  const uint64_t restarted = now_ns();
  trace.start(false);
  trace.add(Kind::Broadcast, operations, begun);
  trace.add_plan(7);  // not asked for
  trace.stop();
  trace.add(Kind::Broadcast, operations, begun);
  const auto events = trace.drain();
  CHECK_EQ(events.size(), size_t{2});
  CHECK(within(events[0].begin_ns, restarted, now_ns()));
  CHECK(within(events[1].begin_ns, restarted, now_ns()));
  CHECK_EQ(trace.now(), uint64_t{0});
}

void test_more_than_fits() {
  Trace trace;
  trace.start(false);
  const std::array operations{operation("often")};
  constexpr uint64_t kMore = 1'000'003;
  for (uint64_t i = 0; i < kMore; ++i) trace.add(Kind::Barrier, operations, 0);
  CHECK_EQ(trace.drain().size() + trace.dropped(), size_t{kMore});
  CHECK_EQ(trace.dropped(), uint64_t{3});
}

}  // namespace

int main() {
  test_events();
  test_start_and_stop();
  test_more_than_fits();
  return check::report();
}
