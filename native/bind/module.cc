#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <tuple>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/int8_blocks.h"
#include "base/reduce.h"
#include "bind/bound.h"
#include "bind/calls.h"
#include "bind/capture.h"
#include "bind/copy_rows.h"
#include "bind/errors.h"
#include "bind/fabrics.h"
#include "bind/handle.h"
#include "bind/overlap.h"
#include "bind/read_files.h"
#include "bind/released.h"
#include "bind/request.h"
#include "collectives/grid.h"
#include "engine/engine.h"
#include "engine/trace_file.h"
#include "engine/trace_text.h"
#include "plugins/rank_engines.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace farandole {
namespace {

Handle start(Calls& calls, nb::handle request, nb::handle name, nb::handle input, nb::handle output, bool wake) {
  if (PyUnicode_Check(name.ptr())) return calls.start(request, name, input, output, wake);
  const ReadRequest read(request, "");
  return calls.start_each(read.view(), name, input, output, wake);
}

/// Returns by kind whether its name is in `names`.
std::array<bool, kKinds> kinds_of(const std::vector<std::string>& names) {
  std::array<bool, kKinds> marks{};
  for (uint8_t kind = 0; kind < kKinds; ++kind)
    marks[kind] = std::ranges::find(names, name_of(static_cast<Kind>(kind))) != names.end();
  return marks;
}

using RemoteTuple = std::tuple<int, int, int, int>;

Calls* make_engine(int rank, int size, std::vector<int> local_ranks, std::shared_ptr<Segment> segment,
                   const std::vector<RemoteTuple>& remotes, std::vector<int> hosts, std::vector<int> parents,
                   unsigned cores, const Knobs& knobs, size_t cache_capacity, double spin, double timeout,
                   double heartbeat, double stall, std::vector<int> members, std::string process_set,
                   std::shared_ptr<Fabric> fabric, bool look_ahead, std::vector<std::string> nccl_files,
                   const std::vector<std::string>& through_host, const std::vector<std::string>& by_nccl,
                   bool may_share_gpu) {
  Wiring wiring{rank,
                size,
                std::move(local_ranks),
                std::move(segment),
                {},
                std::move(parents),
                std::move(hosts),
                std::move(members),
                std::move(process_set),
                std::move(fabric),
                cores};
  for (const auto& [peer, control, data, transfers] : remotes)
    wiring.remotes.push_back({peer, Descriptor(control), Descriptor(data), Descriptor(transfers)});
  const auto span = [](double seconds) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
  };
  EngineOptions options{knobs, cache_capacity, span(spin), span(timeout), span(heartbeat), span(stall), look_ahead};
  options.gpu.nccl_files = std::move(nccl_files);
  options.gpu.through_host = kinds_of(through_host);
  options.gpu.by_nccl = kinds_of(by_nccl);
  options.gpu.may_share = may_share_gpu;
  return new Calls(std::make_shared<Engine>(std::move(wiring), options), cache_capacity);
}

nb::ndarray<nb::array_api> shared_buffer(const Calls& calls, size_t bytes) {
  // The tensor, and with it the segment, may be alive when the interpreter ends. That is not a leak.
  nb::set_leak_warnings(false);
  using Held = std::shared_ptr<std::byte>;
  auto* owner = new Held(calls.engine()->shared_buffer(bytes));
  const nb::capsule capsule(owner, [](void* held) noexcept { delete static_cast<Held*>(held); });
  return nb::ndarray<nb::array_api>(owner->get(), {bytes}, capsule, {}, nb::dtype<uint8_t>());
}

nb::dict stats_of(const Calls& calls) {
  Engine& engine = *calls.engine();
  const EngineStats stats = engine.stats();
  nb::dict counters;
  counters["operations"] = stats.operations;
  counters["buckets"] = stats.buckets;
  counters["bytes"] = stats.bytes;
  counters["asked_by_number"] = stats.asked_by_number;
  counters["asked_in_full"] = stats.asked_in_full;
  counters["in_lane"] = stats.in_lane;
  counters["waited_ns"] = stats.waited_ns;
  counters["trace_dropped"] = engine.trace().dropped();
  return counters;
}

using MarkTuple = std::tuple<uint64_t, uint64_t>;

std::tuple<Knobs, uint64_t, std::vector<MarkTuple>> tuned_of(const Calls& calls) {
  const Engine::Tuned tuned = calls.engine()->tuned();
  std::vector<MarkTuple> marks;
  for (const Pace::Mark& mark : tuned.marks) marks.emplace_back(mark.ns, mark.bytes);
  return {tuned.knobs, tuned.turns, std::move(marks)};
}

nb::list stalls_of(const Calls& calls) {
  nb::list stalls;
  const double now = seconds_of(now_ns());
  for (const Negotiator::Stall& stall : calls.engine()->stalls())
    stalls.append(nb::make_tuple(stall.name, now - stall.since, nb::cast(stall.asked), nb::cast(stall.missing)));
  return stalls;
}

nb::bytes next_of(TraceText& text) {
  std::string events;
  {
    const nb::gil_scoped_release released;
    events = text.next();
  }
  return nb::bytes(events.data(), events.size());
}

std::pair<uint64_t, int> append_to_trace(int fd, uint64_t end, nb::bytes events) {
  const std::string_view text(events.c_str(), events.size());
  const nb::gil_scoped_release released;
  const TraceFileState state = append_events(fd, end, text, &::pwrite);
  return {state.end, state.error};
}

void define_wiring(nb::module_& m) {
  nb::class_<Segment>(m, "Segment")
      .def_static("create", &Segment::create, "ranks"_a, "slot_bytes"_a, "pair_rings"_a, "transfer_rings"_a)
      .def_static("attach", &Segment::attach, "fd"_a)
      .def_prop_ro("fd", &Segment::fd)
      .def_prop_ro("ranks", &Segment::ranks)
      .def_prop_ro("slot_bytes", &Segment::slot_bytes)
      .def("mark_dead", [](Segment& segment, int rank) { segment.abort({rank, Abort::Reason::Died}); }, "rank"_a);

  nb::class_<Knobs>(m, "Knobs")
      .def(
          "__init__",
          [](Knobs* self, size_t fusion_threshold, size_t slot_bytes, size_t link_chunk, size_t link_small,
             bool hierarchical) {
            new (self) Knobs{fusion_threshold, slot_bytes, link_chunk, link_small, hierarchical};
          },
          nb::kw_only(), "fusion_threshold"_a, "slot_bytes"_a, "link_chunk"_a, "link_small"_a, "hierarchical"_a)
      .def_ro("fusion_threshold", &Knobs::fusion_threshold)
      .def_ro("slot_bytes", &Knobs::slot_bytes)
      .def_ro("link_chunk", &Knobs::link_chunk)
      .def_ro("link_small", &Knobs::link_small)
      .def_ro("hierarchical", &Knobs::hierarchical);

  m.def("data_peers", &data_peers, "rank"_a, "hosts"_a, "flat"_a = false,
        "The ranks of other hosts that `rank` exchanges data with, when `hosts[r]` is the number of rank r's host.");
  m.def(
      "make_grid", [](const std::vector<int>& hosts) { return grid_of(0, hosts).has_value(); }, "hosts"_a,
      "Return whether all hosts run equally many ranks, more than one.");
}

/// Does feed_error() for two float32 tensors of one size in host memory.
void feed_error_of(nb::handle values, nb::handle error) {
  const Captured into = capture(values, "values");
  const Captured from = capture(error, "error");
  for (const Captured* each : {&into, &from})
    if (each->dtype != DType::Float32 || !each->writable || each->device != nullptr || each->bytes() != into.bytes())
      throw Error::invalid("", "error feedback takes two writable float32 tensors of one size in host memory");
  const nb::gil_scoped_release released;
  feed_error({reinterpret_cast<float*>(into.data), into.bytes() / sizeof(float)}, reinterpret_cast<float*>(from.data));
}

void define_engine(nb::module_& m) {
  nb::class_<StagedResult>(m, "StagedResult")
      .def_prop_ro("shape", &StagedResult::shape, nb::sig("def shape(self) -> tuple[int, ...]"))
      .def("copy_to", &StagedResult::copy_to, "tensor"_a);

  nb::class_<Handle>(m, "Handle")
      .def("done", &Handle::done)
      .def("wait", &Handle::wait)
      .def("result", nb::overload_cast<>(&Handle::result), nb::sig("def result(self) -> Any | None"))
      .def("results", &Handle::results, nb::sig("def results(self) -> list[Any | None]"))
      .def("received_splits", &Handle::received_splits)
      .def("last_joined", &Handle::last_joined)
      .def("source", &Handle::source);

  nb::class_<Calls>(m, "Engine")
      .def(nb::new_(&make_engine), nb::kw_only(), "rank"_a, "size"_a, "local_ranks"_a, "segment"_a, "remotes"_a,
           "hosts"_a, "parents"_a, "cores"_a, "knobs"_a, "cache_capacity"_a, "spin"_a, "timeout"_a, "heartbeat"_a,
           "stall"_a, "members"_a = std::vector<int>{}, "process_set"_a = "", "fabric"_a.none() = nb::none(),
           "look_ahead"_a = true, "nccl_files"_a = std::vector<std::string>{},
           "through_host"_a = std::vector<std::string>{}, "by_nccl"_a = std::vector<std::string>{},
           "may_share_gpu"_a = false)
      .def("start", &start, "request"_a, "name"_a, "input"_a.none(), "output"_a.none(), "wake"_a = true,
           nb::sig("def start(self, request: farandole.core.operations.request.Request, name: str | Sequence[str], "
                   "input: object | None, "
                   "output: object | None, wake: bool = True) -> Handle"))
      .def("run", &Calls::run, "request"_a, "name"_a, "input"_a.none(), "output"_a.none(),
           nb::sig("def run(self, request: farandole.core.operations.request.Request, name: str, input: object | None, "
                   "output: object | None) "
                   "-> Handle | None"))
      .def("start_transfer", &Calls::start_transfer, "sends"_a, "name"_a, "tensor"_a, "peer"_a, "tag"_a,
           nb::sig("def start_transfer(self, sends: bool, name: str, tensor: object, peer: int, tag: int) -> Handle"))
      .def("shared_buffer", &shared_buffer, "nbytes"_a)
      .def("shutdown", &Calls::shutdown)
      .def("require_alive", [](const Calls& calls) { calls.engine()->require_alive(); })
      .def(
          "turn", [](const Calls& calls, const Knobs& knobs, bool paced) { calls.engine()->turn(knobs, paced); },
          "knobs"_a, "paced"_a)
      .def("tuned", &tuned_of)
      .def("stalls", &stalls_of, nb::sig("def stalls(self) -> list[tuple[str, float, list[int], list[int]]]"))
      .def("stats", &stats_of, nb::sig("def stats(self) -> dict[str, int]"))
      .def(
          "start_trace", [](const Calls& calls, bool marks_plans) { calls.engine()->trace().start(marks_plans); },
          "marks_plans"_a)
      .def("stop_trace", [](const Calls& calls) { calls.engine()->trace().stop(); });
}

void define_trace(nb::module_& m) {
  nb::class_<TraceText>(m, "TraceText")
      .def(nb::init<int>(), "rank"_a)
      .def(
          "take",
          [](TraceText& text, const Calls& calls, std::string_view label) {
            text.take(calls.engine()->trace().drain(), label);
          },
          "engine"_a, "label"_a)
      .def("next", &next_of);
  m.def("append_to_trace", &append_to_trace, "fd"_a, "end"_a, "events"_a);
}

void define_plugins(nb::module_& m) {
  nb::class_<plugins::RankEngines>(m, "RankEngines")
      .def(nb::init<int32_t, int32_t>(), "local_rank"_a, "local_size"_a)
      .def_prop_ro("number", &plugins::RankEngines::number)
      .def(
          "add",
          [](plugins::RankEngines& engines, const std::vector<int32_t>& set_ranks, const Calls* calls) {
            if (calls == nullptr) return engines.add(set_ranks, nullptr, nullptr);
            return engines.add(set_ranks, calls->engine(), calls->staging());
          },
          "set_ranks"_a, "engine"_a.none())
      .def("remove", &plugins::RankEngines::remove, "address"_a)
      .def("close", &plugins::RankEngines::close);
  m.def("core_table", [] { return reinterpret_cast<uintptr_t>(&plugins::core_table()); });
}

}  // namespace
}  // namespace farandole

NB_MODULE(_native, m) {
  using namespace farandole;  // NOLINT: the module is made of this namespace
  nb::register_exception_translator(translate);
  // Users' objects often live to the interpreter's end, for example in the traceback of an error. The tests warn.
  nb::set_leak_warnings(false);
  m.def("set_leak_warnings", &nb::set_leak_warnings, "warn"_a);
  // A forked child holds its parent's engines and does not free them. That is not a leak.
  ::pthread_atfork(nullptr, nullptr, [] { nb::set_leak_warnings(false); });
  define_fabrics(m);
  define_wiring(m);
  define_engine(m);
  define_bound(m);
  define_trace(m);
  define_plugins(m);
  m.def("share_memory", &share_memory, "tensors"_a, nb::sig("def share_memory(tensors: Sequence[object]) -> bool"));
  m.def("simd_level", &simd_level);
  m.def("feed_error", &feed_error_of, "values"_a, "error"_a,
        nb::sig("def feed_error(values: object, error: object) -> None"));
  m.def("copy_rows", &copy_rows, "target"_a, "rows"_a, nb::sig("def copy_rows(target: Any, rows: list[Any]) -> None"));
  m.def("read_files", &read_files, "parts"_a,
        nb::sig("def read_files(parts: Sequence[tuple[str, int, int]]) -> list[tuple[bytes, int, int] | OSError]"));
}
