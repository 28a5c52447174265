// Operations among GPUs by NCCL that cannot end: lost ranks, failures of NCCL and of devices, over stand-ins.
#include <atomic>
#include <string>

#include "nccl_stand_in.h"

using namespace ranks;
using namespace farandole;
using check::cuda;
using nccl::set;
using std::chrono::milliseconds;

namespace {

/// Starts a sum that hangs on the devices, after one that works. The host does not wait for it.
std::shared_ptr<StagedCall> start_stuck(DeviceRank& rank, const DeviceNumbers& numbers) {
  rank.finish(*rank.sum("warm", numbers), numbers);
  CHECK(numbers.read() == std::vector<float>(10, total(rank)));
  set("stand_in_nccl_stuck", 1);
  const auto call = rank.sum("x", numbers);
  rank.wait(*call);
  return call;
}

/// Waits until the operation has ended on the device, and throws the failure that has ended it.
void wait_for_the_end(DeviceRank& rank, const StagedCall& call) {
  for (int i = 0; i < 10000 && !call.has_returned(); ++i) std::this_thread::sleep_for(milliseconds(1));
  CHECK(call.has_returned());
  rank.staging().require_results();
}

/// A rank is lost while the operation runs on the devices, which would never end.
void test_a_lost_rank() {
  std::atomic<int> waiting{0};
  const auto problems = run_on_devices(
      2,
      [&](DeviceRank& rank) {
        const DeviceNumbers numbers(own(rank, 10), rank.rank());
        const auto call = start_stuck(rank, numbers);
        CHECK(!call->has_returned());
        ++waiting;
        wait_for_the_end(rank, *call);
      },
      {},
      [&](Segment& segment) {
        while (waiting < 2) std::this_thread::sleep_for(milliseconds(1));
        segment.abort({1, Abort::Reason::Died});
      });
  set("stand_in_nccl_stuck", 0);
  for (const std::string& problem : problems)
    check::that(problem.find("rank 1 is lost") != std::string::npos, "rank 1 is named", problem);
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

}  // namespace

int main() {
  cuda().configure(3, 12040, 300);
  set("stand_in_version", 22705);
  test_a_lost_rank();
  test_a_failure();
  test_devices_that_break();
  test_no_communicator();
  CHECK_EQ(cuda().error(), 0);
  return check::report();
}
