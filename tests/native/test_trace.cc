// The events of a timeline: named, on the engine's clock, none from before the start, and all counted.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "engine/trace_file.h"
#include "engine/trace_text.h"

using namespace farandole;

namespace {

OperationPtr operation(const std::string& name) {
  auto made = std::make_shared<Operation>();
  made->request.name = name;
  made->request.shape = {3};
  made->request.dtype = DType::Float32;
  return made;
}

struct Phase {
  std::string what;
  uint64_t begin_ns, end_ns, bytes;
};

std::vector<Phase> phases_of(const TraceBatch& batch) {
  std::vector<Phase> phases;
  for (size_t at = 0; at < batch.size(); ++at)
    batch.visit_phases(at, [&](const TraceEvent& event) {
      phases.push_back(
          {batch.names()[event.name] + " " + event.phase, event.begin_ns, event.end_ns, event.bytes + event.buckets});
    });
  return phases;
}

bool within(uint64_t at, uint64_t from, uint64_t to) {
  constexpr uint64_t kError =
      2'000;  // two clocks are read one after the other, and the thread may be interrupted in between
  return at + kError >= from && at <= to + kError;
}

void test_events() {
  Trace trace;
  const std::array operations{operation("first"), operation("second")};
  trace.add({Kind::Allreduce, "lane", 0, trace.now()}, operations);
  CHECK_EQ(trace.drain().size(), size_t{0});

  trace.start(true);
  for (int time = 0; time < 3; ++time) {
    const uint64_t asked = now_ns();
    operations[0]->submitted_ticks = trace.now();
    const uint64_t begin = now_ns();
    trace.add_plan(1);
    const uint64_t begun = trace.now();
    while (now_ns() < begin + 3'000'000) {
    }
    trace.add({Kind::Allreduce, "lane", begun, begun}, operations);
    const uint64_t end = now_ns();

    const auto phases = phases_of(trace.drain());
    CHECK_EQ(phases.size(), size_t{4});
    CHECK_EQ(phases[0].what, std::string("plans plan"));
    CHECK_EQ(phases[0].bytes, uint64_t{1});
    CHECK_EQ(phases[1].what, std::string("first negotiate"));
    CHECK(within(phases[1].begin_ns, asked, begin));
    CHECK_EQ(phases[1].end_ns, phases[2].begin_ns);
    CHECK_EQ(phases[2].what, "first " + std::string(name_of(Kind::Allreduce)));
    CHECK(within(phases[2].begin_ns, begin, begin + 1'000'000));
    CHECK(within(phases[2].end_ns, begin + 3'000'000, end));
    CHECK_EQ(phases[2].bytes, uint64_t{12});
    CHECK_EQ(phases[3].what, "second " + std::string(name_of(Kind::Allreduce)));
  }
}

void test_queue() {
  Trace trace;
  const std::array operations{operation("queued")};
  trace.start(false);
  operations[0]->submitted_ticks = trace.now();
  const uint64_t agreed = trace.now();
  const uint64_t then = now_ns();
  while (now_ns() < then + 2'000'000) {
  }
  trace.add({Kind::Allreduce, "links", agreed, trace.now()}, operations);
  const auto phases = phases_of(trace.drain());
  CHECK_EQ(phases.size(), size_t{3});
  CHECK_EQ(phases[0].what, std::string("queued negotiate"));
  CHECK_EQ(phases[1].what, std::string("queued queue"));
  CHECK_EQ(phases[0].end_ns, phases[1].begin_ns);
  CHECK_EQ(phases[1].end_ns, phases[2].begin_ns);
  CHECK(phases[1].end_ns >= phases[1].begin_ns + 1'900'000);
}

void test_start_and_stop() {
  Trace trace;
  const std::array operations{operation("early")};
  trace.start(false);
  operations[0]->submitted_ticks = trace.now();
  const uint64_t begun = trace.now();
  trace.add({Kind::Broadcast, "grid", begun, begun}, operations);
  const uint64_t restarted = now_ns();
  trace.start(false);
  trace.add({Kind::Broadcast, "grid", begun, begun}, operations);
  trace.add_plan(7);  // marks are off
  trace.stop();
  trace.add({Kind::Broadcast, "grid", begun, begun}, operations);
  const auto phases = phases_of(trace.drain());
  CHECK_EQ(phases.size(), size_t{2});
  CHECK(within(phases[0].begin_ns, restarted, now_ns()));
  CHECK(within(phases[1].begin_ns, restarted, now_ns()));
  CHECK_EQ(trace.now(), uint64_t{0});
}

void test_more_than_fits() {
  Trace trace;
  trace.start(false);
  const std::array operations{operation("often")};
  constexpr uint64_t kMore = 1'000'003;
  for (uint64_t i = 0; i < kMore; ++i) trace.add({Kind::Barrier, "links", 0, 0}, operations);
  CHECK_EQ(trace.drain().size() + trace.dropped(), size_t{kMore});
  CHECK_EQ(trace.dropped(), uint64_t{3});
}

void test_text() {
  Trace trace;
  trace.start(false);
  const std::array hostile{operation("a\"\\\n\x01\xc3\xa9")};
  const auto begun = trace.now();
  trace.add({Kind::Barrier, "links", begun, begun}, hostile);
  TraceText text(3);
  text.take(trace.drain(), "set: ");
  const std::string events = text.next();
  const std::string spelled = "a\\\"\\\\\\u000a\\u0001\xc3\xa9";
  CHECK(events.starts_with(R"({"name":"thread_name","ph":"M","args":{"name":"set: )" + spelled +
                           R"("},"pid":3,"tid":1},)" + "\n" + R"({"name":"barrier","ts":)"));
  CHECK(events.ends_with(R"("args":{"tensor":")" + spelled + R"(","bytes":12,"algorithm":"links"}})"));
  CHECK_EQ(text.next(), std::string());

  // Many events come in pieces that form one document together.
  const std::array one{operation("x")};
  for (int i = 0; i < 10'000; ++i) {
    const auto now = trace.now();  // called once: a pause between two calls would be an event
    trace.add({Kind::Barrier, "links", now, now}, one);
  }
  text.take(trace.drain(), "");
  size_t pieces = 0, lines = 0;
  for (std::string piece = text.next(); !piece.empty(); piece = text.next(), ++pieces) {
    CHECK(piece.starts_with("{") && piece.ends_with("}}"));
    lines += 1 + static_cast<size_t>(std::ranges::count(piece, '\n'));
  }
  CHECK(pieces > 1);
  CHECK_EQ(lines, size_t{10'001});
}

size_t writes = 0;

ssize_t watched_write(int fd, const void* data, size_t size, off_t at) {
  ++writes;
  const auto page = [](off_t place) { return place / 4096; };
  CHECK(page(at) == page(at + static_cast<off_t>(size) - 1) || size < 300);  // one event, and a bracket
  const ssize_t written = ::pwrite(fd, data, size, at);
  std::string text(static_cast<size_t>(lseek(fd, 0, SEEK_END)), ' ');
  CHECK_EQ(pread(fd, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  CHECK(text.starts_with("[\n{") && text.ends_with("}\n]\n"));
  return written;
}

void test_a_file_is_whole_after_every_write() {
  FILE* file = std::tmpfile();
  const int fd = fileno(file);
  CHECK(ftruncate(fd, 100'000) == 0);  // earlier content
  std::string events;
  for (int i = 0; i < 2000; ++i)
    events += (i == 0 ? "{" : ",\n{") + std::string(static_cast<size_t>(i % 200), 'x') + "}";
  TraceFileState state = append_events(fd, 0, events, &watched_write);
  state = append_events(fd, state.end, "", &watched_write);
  state = append_events(fd, state.end, "{}", &watched_write);
  CHECK_EQ(state.error, 0);
  CHECK(writes > 50);
  std::string text(state.end + 3, ' ');
  CHECK_EQ(pread(fd, text.data(), text.size() + 1, 0), static_cast<ssize_t>(text.size()));
  CHECK_EQ(text, "[\n" + events + ",\n{}\n]\n");

  const auto full = [](int, const void*, size_t, off_t) -> ssize_t { return errno = ENOSPC, -1; };
  const TraceFileState failed = append_events(fd, state.end, "{}", +full);
  CHECK_EQ(failed.error, ENOSPC);
  CHECK_EQ(failed.end, state.end);
  std::fclose(file);
}

}  // namespace

int main() {
  test_events();
  test_queue();
  test_start_and_stop();
  test_more_than_fits();
  test_text();
  test_a_file_is_whole_after_every_write();
  return check::report();
}
