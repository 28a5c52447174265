// Operations among GPUs by NCCL, over stand-ins whose streams run late: results, order, the ranks' choice, failures.
#include <dlfcn.h>

#include <atomic>
#include <string>

#include "check.h"
#include "device_ranks.h"
#include "engine/device_agreement.h"

using namespace ranks;
using namespace farandole;
using check::cuda;
using std::chrono::milliseconds;

namespace {

template <class F>
F function(const char* name) {
  static void* loaded = ::dlopen(STAND_IN_NCCL, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<F>(::dlsym(loaded, name));
}

void set(const char* name, int value) { function<void (*)(int)>(name)(value); }
int count(const char* name) { return function<int (*)()>(name)(); }

/// Runs the ranks, and requires that they worked by NCCL without host memory, or not at all by it.
void must_run(int size, const DeviceBody& body, bool by_nccl = true, const GpuOptions& gpu = {}) {
  const size_t pinned = cuda().pinned();
  const int run = count("stand_in_nccl_run");
  for (const std::string& problem : run_on_devices(size, body, gpu)) check::equal(problem, std::string());
  CHECK_EQ(count("stand_in_nccl_run") > run, by_nccl);
  if (by_nccl) CHECK_EQ(cuda().pinned(), pinned);
  CHECK_EQ(count("stand_in_nccl_mismatches"), 0);
  CHECK_EQ(cuda().error(), 0);
}

std::vector<float> own(const DeviceRank& rank, size_t count, float extra = 0) {
  return std::vector<float>(count, static_cast<float>(rank.rank() + 1) + extra);
}

float total(const DeviceRank& rank) { return static_cast<float>(rank.size() * (rank.size() + 1)) / 2; }

/// In place and into other memory; many at once, waited for in another order.
void sums(DeviceRank& rank) {
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<DeviceNumbers>> in, out;
    std::vector<std::shared_ptr<StagedCall>> calls;
    for (int i = 0; i < 12; ++i) {
      const auto count = static_cast<size_t>(i * i * 100);
      const auto extra = static_cast<float>(round + i);
      in.push_back(std::make_unique<DeviceNumbers>(own(rank, count, extra), rank.rank()));
      out.push_back(i % 3 == 0 ? nullptr : std::make_unique<DeviceNumbers>(std::vector<float>(count, -1), rank.rank()));
      const DeviceNumbers* to = out.back() ? out.back().get() : in.back().get();
      calls.push_back(
          rank.start(request_of(Kind::Allreduce, 0, true),
                     DeviceRank::tensor("x" + std::to_string(i), *in.back(), to, {static_cast<int64_t>(count)})));
    }
    for (size_t i = calls.size(); i-- > 0;) {
      const DeviceNumbers& to = out[i] ? *out[i] : *in[i];
      rank.finish(*calls[i], to);
      const float expected = total(rank) + static_cast<float>(rank.size() * (round + static_cast<int>(i)));
      check::that(to.read() == std::vector<float>(i * i * 100, expected), "the sum", std::to_string(i));
    }
  }
}

/// NCCL applies factors to the inputs.
void averages(DeviceRank& rank) {
  const DeviceNumbers numbers(own(rank, 500), rank.rank());
  RequestView request = request_of(Kind::Allreduce);
  request.op = ReduceOp::Average;
  request.prescale = 3;
  request.postscale = 0.5;
  const auto call = rank.start(request, DeviceRank::tensor("a", numbers, &numbers, {500}));
  rank.finish(*call, numbers);
  const float expected = total(rank) * 1.5F / static_cast<float>(rank.size());
  for (const float each : numbers.read()) check::that(std::abs(each - expected) < 1e-5F, "the average", "");
}

void broadcasts(DeviceRank& rank) {
  for (int root = 0; root < rank.size(); ++root) {
    const DeviceNumbers numbers(own(rank, 2000), rank.rank());
    const auto call = rank.start(request_of(Kind::Broadcast, root),
                                 DeviceRank::tensor("b" + std::to_string(root), numbers, &numbers, {2000}));
    rank.finish(*call, numbers);
    CHECK(numbers.read() == std::vector<float>(2000, static_cast<float>(root + 1)));
  }
}

/// The operation comes after the work of the caller's stream, and the host waits for neither.
void late_inputs(DeviceRank& rank) {
  const DeviceNumbers warm(own(rank, 1), rank.rank());
  rank.finish(*rank.sum("warm", warm), warm);
  const DeviceNumbers late(std::vector<float>(50, -1), rank.rank());
  void* key = cuda().close(late.stream());
  const std::vector<float> values = own(rank, 50);
  cuda().write(late.address(), values.data(), late.bytes(), late.stream());
  const auto call = rank.sum("late", late);
  rank.finish(*call, late);
  CHECK(!call->has_returned());
  cuda().open(key);
  CHECK(late.read() == std::vector<float>(50, total(rank)));
  CHECK(call->has_returned());
}

/// A tensor is kept until the operation has ended on the device.
void kept_tensors(DeviceRank& rank) {
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = kept;
  const DeviceNumbers numbers(own(rank, 50), rank.rank());
  void* key = cuda().close(numbers.stream());
  const std::vector<int64_t> shape{50};
  StagedTensor tensor = DeviceRank::tensor("x", numbers, &numbers, shape);
  tensor.keep = std::move(kept);
  const auto call = rank.start(request_of(Kind::Allreduce), tensor);
  tensor.keep.reset();
  rank.wait(*call);
  std::this_thread::sleep_for(milliseconds(3));
  CHECK(!alive.expired());
  cuda().open(key);
  call->hold(numbers.device(), numbers.stream());
  CHECK(numbers.read() == std::vector<float>(50, total(rank)));
  for (int i = 0; i < 1000 && !alive.expired(); ++i) std::this_thread::sleep_for(milliseconds(1));
  CHECK(alive.expired());
}

/// Members that NCCL cannot reduce go through host memory, in the same group.
void mixed_group(DeviceRank& rank) {
  const DeviceNumbers first(own(rank, 70), rank.rank()), second(own(rank, 3), rank.rank());
  const std::vector<int64_t> many{70}, shorts{6};
  std::vector<StagedTensor> tensors{DeviceRank::tensor("", first, &first, many),
                                    DeviceRank::tensor("", second, &second, shorts)};
  tensors[1].view.dtype = DType::Int16;  // sums of the bits, which are the same on all ranks' upper halves
  RequestView request = request_of(Kind::Allreduce);
  request.name = "g";
  request.grouped = true;
  const auto call = rank.staging().start(request, tensors);
  rank.finish(*call, first);
  CHECK(first.read() == std::vector<float>(70, total(rank)));
}

/// While a rank has joined, operations go through host memory.
void joins(DeviceRank& rank) {
  const DeviceNumbers numbers(own(rank, 40), rank.rank());
  rank.finish(*rank.sum("x", numbers), numbers);
  if (rank.rank() > 0) {
    rank.finish(*rank.sum("y", numbers), numbers);
    const auto others = static_cast<float>(rank.size() - 1);
    CHECK(numbers.read() == std::vector<float>(40, total(rank) * others));
  }
  rank.join();
}

std::vector<DeviceCard> cards(size_t size) {
  std::vector<DeviceCard> made(size);
  for (size_t rank = 0; rank < size; ++rank) {
    made[rank].is_able = true;
    made[rank].version = 22705;
    made[rank].gpu[0] = static_cast<char>(rank + 1);
  }
  return made;
}

void test_the_choice() {
  std::vector<DeviceCard> given = cards(3);
  CHECK(decide(given).why_not.empty());
  CHECK(decide(given).uses_nccl(Kind::Allreduce));
  given[2].through_host[static_cast<size_t>(Kind::Allreduce)] = true;
  CHECK(!decide(given).uses_nccl(Kind::Allreduce));
  CHECK(decide(given).uses_nccl(Kind::Broadcast));
  given[2].gpu = given[1].gpu;
  CHECK_EQ(decide(given).why_not, "ranks 1 and 2 are on the same GPU");
  given[1].version = 21800;
  CHECK_EQ(decide(given).why_not, "rank 0 has NCCL 2.27.5, and rank 1 has 2.18.0");
  given[1].is_able = false;
  std::string("no NCCL").copy(given[1].why_not.data(), 7);
  CHECK_EQ(decide(given).why_not, "rank 1 cannot (no NCCL)");
  Request request;
  request.name = "x";
  request.kind = Kind::Allreduce;
  CHECK(!decide(given).refusal(request));
  given[0].by_nccl[static_cast<size_t>(Kind::Allreduce)] = true;
  CHECK(decide(given).refusal(request).has_value());
  request.kind = Kind::Broadcast;
  CHECK(!decide(given).refusal(request));
}

/// Ranks that share a GPU go through host memory, from an operation that was submitted in device memory on.
void test_a_shared_gpu() {
  cuda().share(1);
  must_run(2, sums, false);
  GpuOptions demanded;
  demanded.by_nccl[static_cast<size_t>(Kind::Allreduce)] = true;
  must_run(
      2,
      [](DeviceRank& rank) {
        const DeviceNumbers numbers(own(rank, 40), rank.rank());
        const auto call = rank.sum("x", numbers);
        const Error error = check::thrown<Error>([&] { rank.wait(*call); });
        CHECK(error.kind == ErrorKind::Invalid);
        CHECK_EQ(std::string(error.what()),
                 "'x': NCCL is demanded (HOROVOD_GPU_OPERATIONS or HOROVOD_GPU_ALLREDUCE), and cannot be used: ranks 0 "
                 "and 1 are on the same GPU; give every rank a GPU of its own and the same NCCL, or set MPI there, "
                 "which stands for host memory");
        broadcasts(rank);  // the job goes on
      },
      false, demanded);
  cuda().share(0);
}

void test_settings() {
  GpuOptions host;
  host.through_host.fill(true);
  must_run(2, sums, false, host);
}

/// A rank that works on several GPUs cannot use NCCL; one that began with NCCL is told.
void test_several_gpus() {
  must_run(
      2,
      [](DeviceRank& rank) {
        const DeviceNumbers first(own(rank, 40), 0), second(own(rank, 40), 1);
        const std::vector<int64_t> shape{40};
        const std::vector<StagedTensor> tensors{DeviceRank::tensor("", first, &first, shape),
                                                DeviceRank::tensor("", second, &second, shape)};
        RequestView request = request_of(Kind::Allreduce);
        request.name = "g";
        request.grouped = true;
        const auto call = rank.staging().start(request, tensors);
        rank.finish(*call, first);
        call->hold(second.device(), second.stream());
        CHECK(first.read() == std::vector<float>(40, total(rank)));
        CHECK(second.read() == std::vector<float>(40, total(rank)));
      },
      false);
  must_run(2, [](DeviceRank& rank) {
    const DeviceNumbers first(own(rank, 40), rank.rank()), second(own(rank, 40), 1 - rank.rank());
    rank.finish(*rank.sum("x", first), first);
    CHECK(first.read() == std::vector<float>(40, total(rank)));
    const Error error = check::thrown<Error>([&] { (void)rank.sum("y", second); });
    CHECK(error.kind == ErrorKind::Invalid);
    CHECK(std::string(error.what()).find("; use one GPU for each rank, or set HOROVOD_GPU_OPERATIONS=MPI") !=
          std::string::npos);
  });
}

/// A rank is lost while the operation runs on the devices, which would never end.
void test_a_lost_rank() {
  std::atomic<int> waiting{0};
  const auto problems = run_on_devices(
      2,
      [&](DeviceRank& rank) {
        const DeviceNumbers numbers(own(rank, 10), rank.rank());
        rank.finish(*rank.sum("warm", numbers), numbers);
        CHECK(numbers.read() == std::vector<float>(10, total(rank)));
        set("stand_in_nccl_stuck", 1);
        const auto call = rank.sum("x", numbers);
        rank.wait(*call);
        CHECK(!call->has_returned());
        ++waiting;
        for (int i = 0; i < 10000 && !call->has_returned(); ++i) std::this_thread::sleep_for(milliseconds(1));
        CHECK(call->has_returned());
        rank.staging().require_results();
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
    rank.finish(*rank.sum("warm", numbers), numbers);
    CHECK(numbers.read() == std::vector<float>(10, total(rank)));
    set("stand_in_nccl_stuck", 1);
    const auto call = rank.sum("x", numbers);
    rank.wait(*call);
    if (rank.rank() == 0) set("stand_in_nccl_break", 6);
    for (int i = 0; i < 10000 && !call->has_returned(); ++i) std::this_thread::sleep_for(milliseconds(1));
    CHECK(call->has_returned());
    rank.staging().require_results();
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
    rank.finish(*rank.sum("warm", numbers), numbers);
    CHECK(numbers.read() == std::vector<float>(10, total(rank)));
    set("stand_in_nccl_stuck", 1);
    const auto call = rank.sum("x", numbers);
    rank.wait(*call);
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
  test_the_choice();
  for (const int size : {1, 2, 3}) {
    for (const DeviceBody& body : {DeviceBody(sums), DeviceBody(averages), DeviceBody(broadcasts),
                                   DeviceBody(late_inputs), DeviceBody(kept_tensors)})
      must_run(size, body);
  }
  for (const std::string& problem : run_on_devices(2, mixed_group)) check::equal(problem, std::string());
  for (const std::string& problem : run_on_devices(3, joins)) check::equal(problem, std::string());
  test_a_shared_gpu();
  test_settings();
  test_several_gpus();
  test_a_lost_rank();
  test_a_failure();
  test_devices_that_break();
  test_no_communicator();
  CHECK_EQ(cuda().error(), 0);
  return check::report();
}
