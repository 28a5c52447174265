// Operations among GPUs by NCCL, over stand-ins whose streams run late: results, order, the ranks' choice.
#include <atomic>
#include <string>

#include "base/log.h"
#include "engine/device_agreement.h"
#include "nccl_stand_in.h"

using namespace ranks;
using namespace farandole;
using check::cuda;
using nccl::must_run, nccl::set;
using std::chrono::milliseconds;

namespace {

void sums(DeviceRank& rank) {
  many_sums(rank, [&](int) { return rank.rank(); });
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
  CHECK(decide(given, {}).why_not.empty());
  CHECK(decide(given, {}).uses_nccl(Kind::Allreduce));
  given[2].through_host[static_cast<size_t>(Kind::Allreduce)] = true;
  CHECK(!decide(given, {}).uses_nccl(Kind::Allreduce));
  CHECK(decide(given, {}).uses_nccl(Kind::Broadcast));
  given[2].gpu = given[1].gpu;
  CHECK_EQ(decide(given, {}).why_not, "ranks 1 and 2 are on the same GPU; let each use the one at its local rank");
  CHECK_EQ(decide(given, {7, 8, 9}).why_not,
           "ranks 8 and 9 are on the same GPU; let each use the one at its local rank");
  given[1].may_share = true;
  CHECK(!decide(given, {}).why_not.empty());
  given[2].may_share = true;
  CHECK(decide(given, {}).why_not.empty());
  for (DeviceCard& card : given) {
    CHECK(!decide(given, {}).is_by_settings);
    card.through_host.fill(true);
  }
  CHECK(decide(given, {}).is_by_settings);
  given[1].version = 21800;
  CHECK_EQ(decide(given, {}).why_not,
           "rank 0 has NCCL 2.27.5, and rank 1 has 2.18.0; install one version on all hosts");
  given[1].is_able = false;
  std::string("no NCCL").copy(given[1].why_not.data(), 7);
  CHECK_EQ(decide(given, {}).why_not, "rank 1 cannot use NCCL (no NCCL)");
  Request request;
  request.name = "x";
  request.kind = Kind::Allreduce;
  CHECK(!decide(given, {}).refusal(request));
  given[0].by_nccl[static_cast<size_t>(Kind::Allreduce)] = true;
  CHECK(decide(given, {}).refusal(request).has_value());
  request.kind = Kind::Broadcast;
  CHECK(!decide(given, {}).refusal(request));
}

std::atomic<int> warnings{0};

void note_warning(const char* line) noexcept {
  if (std::string(line).find("through host memory, because ") != std::string::npos) ++warnings;
}

/// Ranks that share a GPU go through host memory, from an operation that was submitted in device memory on. One of them
/// says so.
void test_a_shared_gpu() {
  cuda().share(1);
  set_warning_sink(note_warning);
  must_run(2, sums, false);
  CHECK_EQ(warnings, 1);
  GpuOptions demanded;
  demanded.by_nccl[static_cast<size_t>(Kind::Allreduce)] = true;
  must_run(
      2,
      [](DeviceRank& rank) {
        const DeviceNumbers numbers(own(rank, 40), rank.rank());
        const auto call = rank.sum("x", numbers);
        const Error error = check::thrown<Error>([&] { rank.wait(*call); });
        CHECK(error.kind == ErrorKind::Invalid);
        CHECK_EQ(
            std::string(error.what()),
            "'x': NCCL is required (HOROVOD_GPU_OPERATIONS or HOROVOD_GPU_ALLREDUCE), but it cannot be used: ranks "
            "0 and 1 are on the same GPU; let each use the one at its local rank. Set the variable to MPI to use "
            "host memory instead");
        broadcasts(rank);  // the job goes on
      },
      false, demanded);
  warnings = 0;
  GpuOptions host;
  host.through_host.fill(true);
  must_run(2, sums, false, host);  // as it was asked for
  CHECK_EQ(warnings, 0);
  set_warning_sink(nullptr);
  cuda().share(0);
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
  test_several_gpus();
  CHECK_EQ(cuda().error(), 0);
  return check::report();
}
