// NCCL's library and communicators by a stand-in: what is said when it cannot be used, and the end of waits.
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "nccl_stand_in.h"
#include "transport/nccl_comm.h"

using namespace farandole;
using check::cuda;
using nccl::count, nccl::set;

namespace {

constexpr int kUnhandledCuda = 1, kRemote = 6;

void ignore(const Error&) {}

/// A guard that throws once it is told to.
class Switch final : public Guard {
 public:
  void check() override {
    if (lost.load()) throw Error::peer_lost("x", 1, "its process was killed or crashed");
  }
  std::atomic<bool> lost{false};
};

std::string problem_of(const std::vector<std::string>& files) {
  const Error error = CHECK_THROWS(Error, NcclLibrary(files));
  CHECK(error.kind == ErrorKind::Invalid);
  return error.what();
}

void expect_text(const std::string& text, const std::string& part) {
  check::that(text.find(part) != std::string::npos, "the text has the part", "'" + text + "', '" + part + "'");
}

void test_a_library_that_cannot_be_used() {
  const std::string none = problem_of({"libno_nccl.so.2", "libno_other.so.2"});
  expect_text(none, "NCCL cannot be loaded; install the package nvidia-nccl (libno_nccl.so.2: ");
  expect_text(none, "; libno_other.so.2: ");
  expect_text(problem_of({"libm.so.6"}),
              "libm.so.6 has no ncclGetErrorString, and NCCL 2.18.0 or later is needed; update ");
  set("stand_in_version", 21403);  // loads the stand-in, so no file is needed from here on
  expect_text(problem_of({}), "libnccl.so.2 is NCCL 2.14.3, and 2.18.0 or later is needed; update the framework that ");
  set("stand_in_version", 22705);
}

std::shared_ptr<const NcclLibrary> library() {
  // Loaded by another path: no file is needed.
  static const auto opened = std::make_shared<const NcclLibrary>(std::vector<std::string>{});
  return opened;
}

CudaDevice& device() { return CudaDevice::of(0); }

void test_ranks_meet() {
  const auto id = NcclComm::make_id(*library(), device());
  CHECK(id != NcclComm::make_id(*library(), device()));
  std::vector<std::thread> threads;
  const int ended = count("stand_in_nccl_destroyed");
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      Switch guard;
      NcclComm comm(library(), CudaDevice::of(rank), id, rank, 3, guard, ignore);
      int enqueued = 0;
      comm.group([&] { return ++enqueued, 0; });
      comm.check();
      CHECK_EQ(enqueued, 1);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(count("stand_in_nccl_destroyed"), ended + 3);
  CHECK_EQ(count("stand_in_nccl_aborted"), 0);
}

void test_a_lost_rank_ends_the_wait_for_it() {
  Switch guard;
  const int aborted = count("stand_in_nccl_aborted");
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    guard.lost = true;
  });
  const auto id = NcclComm::make_id(*library(), device());
  const Error error = CHECK_THROWS(Error, NcclComm(library(), device(), id, 0, 2, guard, ignore));
  CHECK(error.kind == ErrorKind::PeerLost);
  later.join();
  CHECK_EQ(count("stand_in_nccl_aborted"), aborted + 1);
}

void test_failures() {
  Switch guard;
  const auto id = NcclComm::make_id(*library(), device());
  set("stand_in_nccl_fail", kUnhandledCuda);
  const Error refused = CHECK_THROWS(Error, NcclComm(library(), device(), id, 0, 1, guard, ignore));
  CHECK(refused.kind == ErrorKind::Fabric);
  expect_text(refused.what(), "ncclCommInitRankConfig failed: unhandled cuda error (1): the stand-in says so");
  set("stand_in_nccl_fail", 0);
  NcclComm comm(library(), device(), id, 0, 1, guard, ignore);
  set("stand_in_nccl_break", kRemote);
  const Error broken = CHECK_THROWS(Error, comm.check());
  expect_text(broken.what(), "an operation of NCCL failed: remote process error (6)");
  set("stand_in_nccl_break", 0);
  CHECK(comm.is_aborted());
  expect_text(CHECK_THROWS(Error, comm.group([] { return 0; })).what(), "NCCL's communicator was aborted");
}

}  // namespace

int main() {
  cuda().configure(3, 12040, 200);
  test_a_library_that_cannot_be_used();
  test_ranks_meet();
  test_a_lost_rank_ends_the_wait_for_it();
  test_failures();
  CHECK_EQ(count("stand_in_nccl_strays"), 0);
  return check::report();
}
