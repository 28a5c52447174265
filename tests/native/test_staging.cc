// Collectives on device memory through pinned host memory, over a stand-in for CUDA whose streams run late: results,
// order, errors, and that no memory stays in use.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "check.h"
#include "device_ranks.h"

using namespace ranks;
using namespace farandole;
using check::cuda;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

using Body = DeviceBody;

std::vector<std::string> run_ranks(int size, const Body& body) { return run_on_devices(size, body); }

void must_run(int size, const Body& body) {
  for (const std::string& problem : run_ranks(size, body)) check::equal(problem, std::string());
}

void sums(DeviceRank& rank) {
  many_sums(rank, [](int i) { return i % 2; });
}

/// The members of a group run together; one of them lies in host memory.
void groups(DeviceRank& rank) {
  const DeviceNumbers first(own(rank, 700));
  const DeviceNumbers second(own(rank, 3), 1);
  std::vector<float> host = own(rank, 5);
  const std::vector<int64_t> many{700}, few{3}, shape{5};
  std::vector<StagedTensor> tensors{
      DeviceRank::tensor("", first, &first, many), DeviceRank::tensor("", second, &second, few), {}};
  auto* memory = reinterpret_cast<std::byte*>(host.data());
  tensors[2].view = {.input = memory, .output = memory, .room = 20, .dtype = DType::Float32, .shape = shape};
  RequestView request = request_of(Kind::Allreduce);
  request.name = "g";
  request.grouped = true;
  const auto call = rank.staging().start(request, tensors);
  rank.finish(*call, first);
  call->hold(second.device(), second.stream());
  CHECK(first.read() == std::vector<float>(700, total(rank)));
  CHECK(second.read() == std::vector<float>(3, total(rank)));
  CHECK(host == std::vector<float>(5, total(rank)));
  CHECK(call->is_on_device(0) && !call->is_on_device(2));
}

void broadcasts(DeviceRank& rank) {
  for (int root = 0; root < rank.size(); ++root) {
    const DeviceNumbers numbers(own(rank, 2000));
    const auto call = rank.start(request_of(Kind::Broadcast, root),
                                 DeviceRank::tensor("b" + std::to_string(root), numbers, &numbers, {2000}));
    rank.finish(*call, numbers);
    CHECK(numbers.read() == std::vector<float>(2000, static_cast<float>(root + 1)));
  }
}

/// The plan has the size of the result: ranks get it from pinned memory, or in memory that they give.
void gathers(DeviceRank& rank) {
  const auto mine = static_cast<size_t>(rank.rank() * 100);  // nothing from rank 0
  const DeviceNumbers numbers(own(rank, mine));
  std::vector<float> expected;
  for (int each = 0; each < rank.size(); ++each)
    expected.insert(expected.end(), static_cast<size_t>(each * 100), static_cast<float>(each + 1));
  const DeviceNumbers out(std::vector<float>(expected.size(), -1));
  const RequestView request = request_of(Kind::Allgather);
  const auto given = rank.start(request, DeviceRank::tensor("g", numbers, &out, {static_cast<int64_t>(mine)}));
  rank.finish(*given, out);
  CHECK(out.read() == expected);
  const auto made = rank.start(request, DeviceRank::tensor("h", numbers, nullptr, {static_cast<int64_t>(mine)}));
  rank.wait(*made);
  CHECK_EQ(made->operation(0)->result_shape[0], static_cast<int64_t>(expected.size()));
  const DeviceNumbers other(std::vector<float>(expected.size(), -1));
  Staging& staging = rank.staging();
  const auto copy = [&](size_t bytes) {
    return staging.copy_result(*made, 0, other.device(), other.address(), bytes, other.stream());
  };
  CHECK_THROWS(Error, copy(other.bytes() + 4));
  static_cast<void>(copy(other.bytes()));
  CHECK(other.read() == expected);
  CHECK_THROWS(Error, copy(other.bytes()));  // it is gone
}

/// The operation comes after the work of the caller's stream, however long that takes, and the host is free meanwhile.
void late_inputs(DeviceRank& rank) {
  const DeviceNumbers late(std::vector<float>(50, -1)), early(own(rank, 50), 1);
  void* key = cuda().close(late.stream());
  const std::vector<float> values = own(rank, 50);
  cuda().write(late.address(), values.data(), late.bytes(), late.stream());
  const auto waiting = rank.sum("late", late);
  CHECK(!rank.staging().wait(*waiting, milliseconds(20)));
  CHECK(!rank.staging().is_done(*waiting));
  cuda().open(key);
  rank.finish(*waiting, late);
  CHECK(late.read() == std::vector<float>(50, total(rank)));
  const auto next = rank.sum("early", early);
  rank.finish(*next, early);
  CHECK(early.read() == std::vector<float>(50, total(rank)));
}

void refusals(DeviceRank& rank) {
  const DeviceNumbers numbers(own(rank, 10));
  void* key = cuda().close(numbers.stream());
  const auto first = rank.sum("x", numbers);
  const Error twice = check::thrown<Error>([&] { (void)rank.sum("x", numbers); });
  CHECK(std::string(twice.what()).find("'x': an operation of the same name is still in flight") == 0);
  CHECK(!rank.staging().wait_for_submissions(milliseconds(5)));
  cuda().open(key);
  CHECK(rank.staging().wait_for_submissions(seconds(20)));
  rank.finish(*first, numbers);
  const Error invalid = check::thrown<Error>(
      [&] { (void)rank.start(request_of(Kind::Broadcast, 9), DeviceRank::tensor("b", numbers, &numbers, {10})); });
  CHECK(invalid.kind == ErrorKind::Invalid);
  CHECK(numbers.read() == std::vector<float>(10, total(rank)));
}

/// A stream that is captured into a CUDA graph is refused, for the operation and for its result. The graph stays good.
void captured_streams(DeviceRank& rank) {
  const DeviceNumbers numbers(own(rank, 10));
  const auto other = cuda().stream(0);
  const auto call = rank.sum("x", numbers);
  rank.wait(*call);
  cuda().capture(other, 1);
  const Error refused = check::thrown<Error>([&] { call->hold(numbers.device(), other); });
  CHECK(std::string(refused.what()).find("'x': the stream of its tensor is being captured") == 0);
  StagedTensor tensor = DeviceRank::tensor("y", numbers, &numbers, {10});
  const std::vector<int64_t> shape{10};
  tensor.view.shape = shape;
  tensor.output_stream = other;
  CHECK_THROWS(Error, rank.start(request_of(Kind::Allreduce), tensor));
  CHECK_EQ(cuda().capture(other, 0), 1);
  call->hold(numbers.device(), numbers.stream());
  CHECK(numbers.read() == std::vector<float>(10, total(rank)));
}

/// A tensor on a device on one rank, and in host memory on another.
void other_devices(DeviceRank& rank) {
  const DeviceNumbers numbers(own(rank, 4));
  std::vector<float> host = own(rank, 4);
  StagedTensor tensor = DeviceRank::tensor("mixed", numbers, &numbers, {4});
  const std::vector<int64_t> shape{4};
  tensor.view.shape = shape;
  if (rank.rank() == 1) {
    auto* memory = reinterpret_cast<std::byte*>(host.data());
    tensor.view.input = tensor.view.output = memory;
    tensor.device = nullptr;
  }
  const auto call = rank.start(request_of(Kind::Allreduce), tensor);
  const Error error = check::thrown<Error>([&] { rank.wait(*call); });
  CHECK(error.kind == ErrorKind::Mismatch);
  CHECK_EQ(error.what_differs, "device");
  CHECK_EQ(error.asked.at(0), "CUDA tensor");
  CHECK_EQ(error.asked.at(1), "CPU tensor");
  CHECK(numbers.read() == own(rank, 4));
}

/// One rank leaves while the others wait.
void test_a_lost_rank() {
  const std::vector<std::string> problems = run_ranks(3, [](DeviceRank& rank) {
    if (rank.rank() == 2) return;
    const DeviceNumbers numbers(own(rank, 100));
    rank.finish(*rank.sum("x", numbers), numbers);
  });
  CHECK_EQ(problems[2], "");
  for (const int rank : {0, 1})
    check::that(problems[static_cast<size_t>(rank)].find("'x' failed: rank 2 is lost") == 0, "rank 2 is named",
                problems[static_cast<size_t>(rank)]);
}

/// While a result is on its way back, the thread has waited already, and nothing reuses the pinned memory or drops the
/// tensor.
void test_late_copies_back() {
  must_run(1, [](DeviceRank& rank) {
    const std::vector<int64_t> shape{500};
    auto kept = std::make_shared<int>(1);
    const std::weak_ptr<int> alive = kept;
    const DeviceNumbers first(std::vector<float>(500, 1)), second(std::vector<float>(500, 2));
    void* key = cuda().close(first.device().to_device());
    StagedTensor tensor = DeviceRank::tensor("x", first, &first, shape);
    tensor.keep = std::move(kept);
    const auto call = rank.start(request_of(Kind::Allreduce), tensor);
    tensor.keep.reset();
    rank.finish(*call, first);
    const auto other = rank.sum("y", second);
    rank.finish(*other, second);
    std::this_thread::sleep_for(milliseconds(5));
    CHECK(!call->has_returned());
    CHECK(!alive.expired());
    cuda().open(key);
    CHECK(first.read() == std::vector<float>(500, 1));
    CHECK(second.read() == std::vector<float>(500, 2));
    for (int i = 0; i < 1000 && !alive.expired(); ++i) std::this_thread::sleep_for(milliseconds(1));
    CHECK(alive.expired());
  });
}

/// Operations whose inputs are still on their way fail at shutdown. Their memory is kept, because the copies may still
/// use it.
void test_shutdown() {
  std::weak_ptr<DeviceNumbers> alive;
  must_run(1, [&](DeviceRank& rank) {
    auto numbers = std::make_shared<DeviceNumbers>(own(rank, 10));
    alive = numbers;
    void* key = cuda().close(numbers->stream());
    const std::vector<int64_t> shape{10};
    StagedTensor tensor = DeviceRank::tensor("x", *numbers, numbers.get(), shape);
    tensor.keep = std::move(numbers);
    const auto call = rank.start(request_of(Kind::Allreduce), tensor);
    tensor.keep.reset();
    rank.staging().close();
    CHECK(rank.staging().is_done(*call));
    CHECK(call->operation(0)->error->kind == ErrorKind::Closed);
    cuda().open(key);
    const DeviceNumbers others(own(rank, 10));
    CHECK_THROWS(Error, rank.sum("y", others));
  });
  CHECK(!alive.expired());
}

/// close() runs while another thread is in the middle of start(): nothing would submit the call or fail it any more.
void test_a_start_during_close() {
  must_run(1, [](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 10));
    const int before = cuda().calls("cuMemcpyDtoHAsync");
    cuda().hold("cuMemcpyDtoHAsync");
    std::optional<Error> refused;
    std::thread starting([&] {
      try {
        const auto call = rank.sum("x", numbers);
        check::that(rank.staging().is_done(*call), "the call has ended");
      } catch (const Error& error) {
        refused = error;
      }
    });
    while (cuda().calls("cuMemcpyDtoHAsync") == before) std::this_thread::yield();
    rank.staging().close();
    cuda().release();
    starting.join();
    CHECK(refused && refused->kind == ErrorKind::Closed);
  });
}

/// The listener of a submitted operation refers to the staging.
void test_an_end_without_shutdown() {
  std::vector<Wiring> wirings = ranks::wire({0, 0});
  const auto engine = std::make_shared<Engine>(std::move(wirings[0]), options());
  auto staging = std::make_unique<Staging>(engine);
  const DeviceNumbers numbers(std::vector<float>(10, 1));
  const std::vector<int64_t> shape{10};
  const StagedTensor tensor = DeviceRank::tensor("x", numbers, &numbers, shape);
  const auto call = staging->start(request_of(Kind::Allreduce), {&tensor, 1});
  CHECK(staging->wait_for_submissions(seconds(20)));
  staging.reset();  // rank 1 never asks
  CHECK(call->operation(0)->done() && call->operation(0)->error->kind == ErrorKind::Closed);
}

/// The thread of the parent, which waits for calls, is missing in a forked child.
void test_a_forked_child() {
  std::vector<Wiring> wirings = ranks::wire({0});
  const auto engine = std::make_shared<Engine>(std::move(wirings[0]), options());
  auto staging = std::make_unique<Staging>(engine);
  {
    const DeviceNumbers numbers(std::vector<float>(10, 1));
    const std::vector<int64_t> shape{10};
    const StagedTensor tensor = DeviceRank::tensor("x", numbers, &numbers, shape);
    const auto call = staging->start(request_of(Kind::Allreduce), {&tensor, 1});
    CHECK(staging->wait(*call, seconds(20)));
    call->hold(numbers.device(), numbers.stream());
    CHECK(numbers.read() == std::vector<float>(10, 1));
    std::this_thread::sleep_for(milliseconds(20));  // until the thread sleeps
  }
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    staging.reset();
    _exit(0);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

void test_devices_that_fail() {
  for (const char* function : {"cuMemcpyDtoHAsync", "cuEventRecord", "cuMemHostAlloc", "cuMemcpyHtoDAsync"}) {
    const bool at_once = function != std::string("cuMemcpyHtoDAsync");
    must_run(1, [&](DeviceRank& rank) {
      const DeviceNumbers numbers(own(rank, 5000));
      cuda().fail(function, 719, 0);
      const Error error = check::thrown<Error>([&] {
        const auto call = rank.sum("x", numbers);
        CHECK(!at_once);
        rank.wait(*call);
      });
      cuda().fail(function, 0, 0);
      CHECK(error.kind == ErrorKind::Fabric);
      check::that(std::string(error.what()).find(function) != std::string::npos, "the function is named", error.what());
      const auto again = rank.sum("x", numbers);  // the name is free
      rank.finish(*again, numbers);
      CHECK(numbers.read() == own(rank, 5000));
    });
  }
}

/// A device that breaks while the input is on its way.
void test_a_device_that_breaks() {
  must_run(1, [](DeviceRank& rank) {
    const DeviceNumbers numbers(own(rank, 10));
    void* key = cuda().close(numbers.stream());
    const auto call = rank.sum("x", numbers);
    cuda().break_devices(700);
    const Error error = check::thrown<Error>([&] { rank.wait(*call); });
    CHECK_EQ(std::string(error.what()),
             "'x': cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): the stand-in says so");
    cuda().open(key);
    cuda().break_devices(0);
    // The copy may still run, and nobody keeps the numbers here.
    const CudaMark last = numbers.device().mark(numbers.device().to_host());
    while (!last.passed()) std::this_thread::yield();
  });
}

}  // namespace

int main() {
  cuda().configure(2, 12040, 300);
  for (const int size : {1, 2, 3}) {
    for (const Body& body : {Body(sums), Body(groups), Body(broadcasts), Body(gathers), Body(late_inputs)})
      must_run(size, body);
    must_run(size, refusals);
  }
  must_run(2, other_devices);
  must_run(1, captured_streams);
  test_a_lost_rank();
  test_late_copies_back();
  CHECK_EQ(cuda().pinned(), size_t{0});
  test_shutdown();
  test_a_start_during_close();
  test_an_end_without_shutdown();
  test_a_forked_child();
  test_devices_that_fail();
  test_a_device_that_breaks();
  CHECK_EQ(cuda().error(), 0);
  return check::report();
}
