// Operations among GPUs by NCCL that cannot end: lost ranks, failures of NCCL and of devices, over stand-ins.
#include <atomic>
#include <string>

#include "base/clock.h"
#include "nccl_stand_in.h"

using namespace ranks;
using namespace farandole;
using check::cuda;
using nccl::set;
using std::chrono::milliseconds;

namespace {

constexpr uint64_t kSoon = 800'000'000;  // ns; less than what operations get when a rank leaves in order

/// Starts an operation that hangs on the devices, after a sum that works. The host does not wait for it.
std::shared_ptr<StagedCall> start_stuck(DeviceRank& rank, const DeviceNumbers& numbers, Kind kind = Kind::Allreduce) {
  rank.finish(*rank.sum("warm", numbers), numbers);
  CHECK(numbers.read() == std::vector<float>(10, total(rank)));
  set("stand_in_nccl_stuck", 1);
  const DeviceNumbers* out = traits_of(kind).is_sized_by_plan() ? nullptr : &numbers;
  const auto call = rank.start(request_of(kind), DeviceRank::tensor("x", numbers, out, {10}));
  rank.wait(*call);
  return call;
}

/// Waits until the operation has ended on the device, and throws the failure that has ended it.
void wait_for_the_end(DeviceRank& rank, const StagedCall& call) {
  for (int i = 0; i < 10000 && !call.has_returned(); ++i) std::this_thread::sleep_for(milliseconds(1));
  CHECK(call.has_returned());
  rank.staging().require_results();
}

/// A rank is lost while the operation runs on the devices, which would never end. The communicators are aborted at
/// once.
void test_a_lost_rank(Kind kind) {
  const int aborted = nccl::count("stand_in_nccl_aborted");
  std::atomic<int> waiting{0}, late{0};
  std::atomic<uint64_t> lost_at{0};
  const auto problems = run_on_devices(
      2,
      [&](DeviceRank& rank) {
        const DeviceNumbers numbers(own(rank, 10), rank.rank());
        const auto call = start_stuck(rank, numbers, kind);
        CHECK(!call->has_returned());
        ++waiting;
        try {
          wait_for_the_end(rank, *call);
        } catch (const Error&) {
          if (now_ns() - lost_at > kSoon) ++late;
          throw;
        }
      },
      {},
      [&](Segment& segment) {
        while (waiting < 2) std::this_thread::sleep_for(milliseconds(1));
        lost_at = now_ns();
        segment.abort({1, Abort::Reason::Died});
      });
  set("stand_in_nccl_stuck", 0);
  for (const std::string& problem : problems)
    check::that(problem.find("rank 1 is lost") != std::string::npos, "rank 1 is named", problem);
  CHECK_EQ(nccl::count("stand_in_nccl_aborted"), aborted + 2);
  CHECK_EQ(late, 0);
}

/// NCCL reports the broken connections of a lost rank as well. The others name the rank, and not what NCCL says.
void test_a_failure_by_a_lost_rank() {
  std::atomic<int> waiting{0};
  const auto problems = run_on_devices(
      2,
      [&](DeviceRank& rank) {
        const DeviceNumbers numbers(own(rank, 10), rank.rank());
        const auto call = start_stuck(rank, numbers);
        ++waiting;
        wait_for_the_end(rank, *call);
      },
      {},
      [&](Segment& segment) {
        while (waiting < 2) std::this_thread::sleep_for(milliseconds(1));
        segment.abort({1, Abort::Reason::Died});
        set("stand_in_nccl_break", 6);
      });
  set("stand_in_nccl_stuck", 0);
  set("stand_in_nccl_break", 0);
  for (const std::string& problem : problems)
    check::that(problem.find("rank 1 is lost") != std::string::npos, "rank 1 is named", problem);
}

/// A rank leaves while its last operation waits on the other's device: the operation ends well.
void test_a_rank_that_leaves() {
  const int aborted = nccl::count("stand_in_nccl_aborted");
  std::atomic<bool> left{false};
  const auto problems = run_on_devices(2, [&](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 10), rank.rank());
    rank.finish(*rank.sum("warm", numbers), numbers);
    CHECK(numbers.read() == std::vector<float>(10, 3));
    void* key = rank.rank() == 0 ? nullptr : cuda().close(numbers.stream());
    const auto call = rank.sum("x", numbers);
    rank.finish(*call, numbers);
    if (rank.rank() == 0) {
      left = true;
      return;
    }
    while (!left) std::this_thread::sleep_for(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(50));
    cuda().open(key);
    CHECK(numbers.read() == std::vector<float>(10, 6));
    rank.staging().require_results();
  });
  for (const std::string& problem : problems) check::equal(problem, std::string());
  CHECK_EQ(nccl::count("stand_in_nccl_aborted"), aborted);
}

/// NCCL reports a failure of an operation: all ranks hear of it.
void test_a_failure() {
  const auto problems = run_on_devices(2, [&](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 10), rank.rank());
    const auto call = start_stuck(rank, numbers);
    if (rank.rank() == 0) set("stand_in_nccl_break", 6);
    wait_for_the_end(rank, *call);
  });
  set("stand_in_nccl_stuck", 0);
  set("stand_in_nccl_break", 0);
  for (const std::string& problem : problems)
    check::that(
        problem.find("remote process error (6)") != std::string::npos || problem.find("is lost") != std::string::npos,
        "the failure is told", problem);
}

/// The devices break while an operation runs.
void test_devices_that_break() {
  std::atomic<int> waiting{0};
  const auto problems = run_on_devices(2, [&](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 10), rank.rank());
    const auto call = start_stuck(rank, numbers);
    for (++waiting; waiting < 2;) std::this_thread::sleep_for(milliseconds(1));
    cuda().break_devices(700);
    rank.finish(*rank.sum("y", numbers), numbers);
  });
  set("stand_in_nccl_stuck", 0);
  cuda().break_devices(0);
  for (const std::string& problem : problems) CHECK(!problem.empty());
}

/// The communicator cannot be made: the job ends with NCCL's text.
void test_no_communicator() {
  set("stand_in_nccl_fail", 1);
  const auto problems = run_on_devices(2, [](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 10), rank.rank());
    rank.finish(*rank.sum("x", numbers), numbers);
  });
  set("stand_in_nccl_fail", 0);
  CHECK(problems[0].find("ncclCommInitRankConfig failed: unhandled cuda error") != std::string::npos ||
        problems[1].find("ncclCommInitRankConfig failed: unhandled cuda error") != std::string::npos);
  for (const std::string& problem : problems) CHECK(!problem.empty());
}

/// The memory of results goes back, also where NCCL fails before they are there; what the pool keeps goes back when the
/// ranks end.
void test_memory_after_a_failure() {
  set("stand_in_nccl_break", 0);
  const size_t live = cuda().live();
  const auto problems = run_on_devices(2, [&](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 1000), rank.rank());
    rank.finish(*rank.sum("warm", numbers), numbers);
    if (rank.rank() == 0) set("stand_in_nccl_break", 6);
    rank.finish(*rank.start(request_of(Kind::Allgather), DeviceRank::tensor("x", numbers, nullptr, {1000})), numbers);
    rank.staging().require_results();
    std::this_thread::sleep_for(milliseconds(500));
    rank.staging().require_results();
  });
  set("stand_in_nccl_break", 0);
  for (const std::string& problem : problems) CHECK(!problem.empty());
  for (int i = 0; i < 5000 && cuda().live() > live; ++i) std::this_thread::sleep_for(milliseconds(1));
  CHECK(cuda().live() <= live);
}

/// NCCL that is too old: host memory, or a sentence where NCCL is demanded. The job goes on.
void test_an_old_library() {
  set("stand_in_version", 21403);
  const auto gather = [](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 3), rank.rank());
    const DeviceNumbers out(std::vector<float>(6, -1), rank.rank());
    rank.finish(*rank.start(request_of(Kind::Allgather), DeviceRank::tensor("x", numbers, &out, {3})), out);
    CHECK(out.read() == std::vector<float>({1, 1, 1, 2, 2, 2}));
  };
  nccl::must_run(2, gather, false);
  GpuOptions demanded;
  demanded.by_nccl[static_cast<size_t>(Kind::Allgather)] = true;
  nccl::must_run(
      2,
      [&](DeviceRank& rank) {
        const Error error = check::thrown<Error>([&] { gather(rank); });
        CHECK(error.kind == ErrorKind::Invalid);
        CHECK_EQ(std::string(error.what()),
                 "'x': NCCL is required (HOROVOD_GPU_OPERATIONS or HOROVOD_GPU_ALLGATHER), but it cannot be used: rank "
                 "0 cannot use NCCL (libnccl.so.2 is NCCL 2.14.3, and 2.18.0 or later is needed; update the framework "
                 "that brings it, or the package nvidia-nccl). Set the variable to MPI to use host memory instead");
        const DeviceNumbers numbers(own(rank, 10), rank.rank());
        rank.finish(*rank.sum("y", numbers), numbers);
        CHECK(numbers.read() == std::vector<float>(10, 3));
      },
      false, demanded);
  set("stand_in_version", 22705);
}

/// A tensor on a GPU on one rank, in host memory on the other: an error on both, and the job goes on by NCCL.
void test_mixed_memory() {
  nccl::must_run(2, [](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 10), rank.rank());
    rank.finish(*rank.sum("warm", numbers), numbers);
    for (const Kind kind : {Kind::Allreduce, Kind::Broadcast, Kind::Allgather, Kind::Alltoall, Kind::Reducescatter}) {
      std::vector<float> host(10, 1);
      auto kept = std::make_shared<int>(1);
      const std::weak_ptr<int> alive = kept;
      const std::vector<int64_t> shape{10};
      StagedTensor tensor =
          DeviceRank::tensor("x", numbers, traits_of(kind).is_sized_by_plan() ? nullptr : &numbers, shape);
      tensor.keep = std::move(kept);
      if (rank.rank() == 1) {
        tensor.device = nullptr;
        auto* memory = reinterpret_cast<std::byte*>(host.data());
        tensor.view.input = memory;
        if (!traits_of(kind).is_sized_by_plan()) tensor.view.output = memory;
      }
      const auto call = rank.start(request_of(kind), tensor);
      tensor.keep.reset();
      const Error error = check::thrown<Error>([&] { rank.wait(*call); });
      CHECK(error.kind == ErrorKind::Mismatch);
      const std::string text = error.what();
      check::that(text.find("rank 0: CUDA tensor") != std::string::npos, "rank 0 is told", text);
      check::that(text.find("rank 1: CPU tensor") != std::string::npos, "rank 1 is told", text);
      for (int i = 0; i < 1000 && !alive.expired(); ++i) std::this_thread::sleep_for(milliseconds(1));
      CHECK(alive.expired());
    }
    rank.finish(*rank.sum("y", numbers), numbers);
    CHECK(numbers.read() == std::vector<float>(10, 6));
  });
}

}  // namespace

int main() {
  cuda().configure(3, 12040, 300);
  set("stand_in_version", 22705);
  for (const Kind kind : {Kind::Allreduce, Kind::Broadcast, Kind::Allgather, Kind::Alltoall, Kind::Reducescatter})
    test_a_lost_rank(kind);
  test_a_failure_by_a_lost_rank();
  test_a_rank_that_leaves();
  test_a_failure();
  test_devices_that_break();
  test_no_communicator();
  test_memory_after_a_failure();
  test_an_old_library();
  test_mixed_memory();
  CHECK_EQ(nccl::count("stand_in_nccl_strays"), 0);
  CHECK_EQ(cuda().error(), 0);
  return check::report();
}
