// The CUDA driver by a stand-in: what is said when it cannot be used, the order of streams, pinned memory.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "cuda_devices.h"
#include "device/pinned_pool.h"

using namespace farandole;
using check::cuda;
using check::DeviceNumbers;

namespace {

constexpr int kNoDevice = 100, kIllegalAddress = 700;

void expect_text(const std::string& text, const std::string& part) {
  check::that(text.find(part) != std::string::npos, "the text has the part", "'" + text + "', '" + part + "'");
}

template <class F>
std::string problem_of(F&& body, ErrorKind kind = ErrorKind::Invalid) {
  const Error error = check::thrown<Error>(body);
  check::that(error.kind == kind, "the kind of the error", error.what());
  return error.what();
}

void test_a_driver_that_cannot_be_used() {
  const std::string missing = problem_of([] { CudaLibrary("libno_such_driver.so.1"); });
  expect_text(missing, "lies on a GPU, and the CUDA driver cannot be used: libno_such_driver.so.1 cannot be loaded");
  expect_text(missing, "install NVIDIA's driver");
  expect_text(problem_of([] { CudaLibrary("libm.so.6"); }),
              "libm.so.6 has no cuInit; NVIDIA's driver for CUDA 11.0 or later is needed");
  cuda().fail("cuInit", kNoDevice, 0);
  expect_text(problem_of([] { (void)CudaLibrary::get(); }),
              "cuInit failed: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected; nvidia-smi says whether "
              "the driver works, and CUDA_VISIBLE_DEVICES which GPUs this process may see");
  cuda().fail("cuInit", 0, 0);
  cuda().configure(2, 10020, 200);
  expect_text(problem_of([] { (void)CudaLibrary::get(); }),
              "NVIDIA's driver supports CUDA 10.2, and 11.0 or later is needed; update the driver");
  cuda().configure(2, 12040, 200);
  CHECK_EQ(CudaLibrary::get().version, 12040);  // an earlier failure does not stay
  expect_text(problem_of([] { CudaDevice::of(2); }), "lies on CUDA device 2, and this process sees 2");
}

void test_a_device_that_fails_leaves_no_streams() {
  const int before = cuda().calls("cuStreamDestroy");
  cuda().fail("cuStreamCreateWithPriority", 2, 2);
  expect_text(problem_of([] { CudaDevice::of(1); }, ErrorKind::Fabric), "cuStreamCreateWithPriority failed");
  cuda().fail("cuStreamCreateWithPriority", 0, 0);
  CHECK_EQ(cuda().calls("cuStreamDestroy") - before, 2);
}

void test_devices_are_made_once() {
  CHECK(&CudaDevice::of(0) == &CudaDevice::of(0));
  CHECK(&CudaDevice::of(0) != &CudaDevice::of(1));
  CHECK_EQ(CudaDevice::of(1).ordinal(), 1);
  CHECK(&CudaDevice::of_stream(cuda().stream(1)) == &CudaDevice::of(1));
}

/// A copy to the host and back through two streams, each of which waits for the one before.
void test_marks_order_streams() {
  CudaDevice& device = CudaDevice::of(0);
  const auto pool = PinnedPool::make(1 << 20);
  for (int round = 0; round < 20; ++round) {
    const std::vector<float> values(1000, static_cast<float>(round));
    const DeviceNumbers from(values);
    const DeviceNumbers to(std::vector<float>(1000, -1));
    const PinnedBuffer host = pool->take(device, from.bytes());
    device.mark(from.stream()).hold(device.to_host());
    device.mark(to.stream()).hold(device.to_host());
    device.copy_to_host(host.data(), from.address(), from.bytes(), device.to_host());
    device.mark(device.to_host()).hold(device.to_device());
    device.copy_to_device(to.address(), host.data(), to.bytes(), device.to_device());
    const CudaMark returned = device.mark(device.to_device());
    returned.hold(to.stream());
    CHECK(to.read() == values);
    CHECK(returned.passed());
  }
}

void test_a_mark_waits_for_its_stream_only() {
  CudaDevice& device = CudaDevice::of(1);
  const DeviceNumbers numbers({1, 2, 3}, 1);
  void* key = cuda().close(numbers.stream());
  const CudaMark late = device.mark(numbers.stream());
  const CudaMark other = device.mark(device.to_device());
  while (!other.passed()) std::this_thread::yield();
  CHECK(!late.passed());
  cuda().open(key);
  while (!late.passed()) std::this_thread::yield();
}

void test_events_are_reused() {
  CudaDevice& device = CudaDevice::of(0);
  const auto wait = [](const CudaMark& mark) {
    while (!mark.passed()) std::this_thread::yield();
  };
  wait(device.mark(device.to_host()));
  const int made = cuda().calls("cuEventCreate");
  for (int i = 0; i < 100; ++i) wait(device.mark(device.to_host()));
  CHECK_EQ(cuda().calls("cuEventCreate"), made);
}

void test_pinned_memory_is_reused() {
  CudaDevice& device = CudaDevice::of(0);
  {
    const auto pool = PinnedPool::make(64 << 10);
    const std::byte* first = nullptr;
    {
      const PinnedBuffer buffer = pool->take(device, 10'000);
      first = buffer.data();
      std::memset(buffer.data(), 1, 10'000);
    }
    CHECK_EQ(pool->kept_bytes(), size_t{12288});
    {
      const PinnedBuffer again = pool->take(device, 9'000);
      CHECK(again.data() == first);
      CHECK(pool->take(device, 9'000).data() != first);  // in use
    }
    CHECK(pool->take(device, 100).data() != first);   // more than twice the needed size
    static_cast<void>(pool->take(device, 60 << 10));  // frees others, which exceed the limit now
    CHECK(pool->kept_bytes() <= size_t{64 << 10});
    CHECK(cuda().pinned() <= size_t{64 << 10});
    CHECK(pool->take(device, 0).data() != nullptr);
  }
  CHECK_EQ(cuda().pinned(), size_t{0});
}

/// Memory in the order of streams is taken from the GPU once, and a bounded part of it stays.
void test_device_memory_is_reused() {
  CudaDevice& device = CudaDevice::of(1);
  const CudaDevice::Stream stream = device.to_device();
  const auto use = [&](size_t bytes) {
    device.free(device.allocate(bytes, stream), stream);
    const CudaMark end = device.mark(stream);
    while (!end.passed()) std::this_thread::yield();
  };
  const int before = cuda().grown();
  for (int i = 0; i < 20; ++i) use(1 << 20);
  CHECK_EQ(cuda().grown(), before + 1);
  use(CudaDevice::kKept + (32 << 20));
  CHECK_EQ(cuda().grown(), before + 2);
  CHECK_EQ(cuda().kept(), size_t{CudaDevice::kKept});
  CHECK_EQ(cuda().calls("cuMemPoolCreate"), 1);
  device.trim_pool();
  CHECK_EQ(cuda().kept(), size_t{0});
}

/// Memory that another stream gives back later holds nobody up.
void test_device_memory_comes_at_once() {
  CudaDevice& device = CudaDevice::of(1);
  const CudaDevice::Stream slow = cuda().stream(1), stream = device.to_device();
  const auto freed = device.allocate(1 << 20, slow);
  void* key = cuda().close(slow);
  device.free(freed, slow);
  const auto taken = device.allocate(1 << 20, stream);
  const CudaMark end = device.mark(stream);
  for (int i = 0; i < 5000 && !end.passed(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(end.passed());
  cuda().open(key);
  device.free(taken, stream);
}

void test_failures_name_the_function() {
  CudaDevice& device = CudaDevice::of(0);
  cuda().fail("cuMemHostAlloc", 2, 0);
  expect_text(problem_of([&] { (void)PinnedPool::make(0)->take(device, 1); }, ErrorKind::Fabric),
              "cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
  cuda().fail("cuMemHostAlloc", 0, 0);
  const CudaMark mark = device.mark(device.to_host());
  cuda().break_devices(kIllegalAddress);
  expect_text(problem_of([&] { (void)mark.passed(); }, ErrorKind::Fabric),
              "cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
  cuda().break_devices(0);
}

/// A graph that another thread of the process captures is not spoiled, and a captured stream is refused.
void test_graphs() {
  CudaDevice& device = CudaDevice::of(0);
  const auto captured = cuda().stream(0), other = cuda().stream(0);
  const auto pool = PinnedPool::make(0);
  CHECK_EQ(cuda().capture(captured, 1), 1);
  const std::string refused = problem_of([&] { device.require_running(captured, "x"); });
  CHECK_EQ(refused,
           "'x': the stream of its tensor is being captured into a CUDA graph, which an operation of several ranks "
           "cannot be part of; capture the computation only, and call it outside");
  device.require_running(other, "x");
  {
    const PinnedBuffer host = pool->take(device, 10);
    const CudaMark mark = device.mark(other);
    while (!mark.passed()) std::this_thread::yield();
  }
  CHECK_EQ(cuda().pinned(), size_t{0});
  CHECK_EQ(cuda().capture(captured, 0), 1);  // the graph is good
  device.require_running(captured, "x");
}

void test_priorities() {
  CudaDevice& device = CudaDevice::of(0);
  const auto urgent = device.make_stream(true), usual = device.make_stream();
  CHECK_EQ(cuda().priority(urgent), -5);
  CHECK_EQ(cuda().priority(usual), 0);
  device.end_stream(urgent);
  device.end_stream(usual);
  CHECK_THROWS(Error, device.mark(usual));
}

/// CUDA does not work in a child that was forked after its start. The child says so.
void test_a_forked_child() {
  static_cast<void>(CudaDevice::of(0));
  const pid_t child = fork();
  if (child == 0) {
    try {
      CudaDevice::of(0);
    } catch (const Error& error) {
      const bool says =
          std::string(error.what()).find("this process was forked from one that uses it") != std::string::npos;
      _exit(error.kind == ErrorKind::Invalid && says ? 0 : 1);
    }
    _exit(2);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

}  // namespace

int main() {
  test_a_driver_that_cannot_be_used();
  test_a_device_that_fails_leaves_no_streams();
  test_devices_are_made_once();
  test_marks_order_streams();
  test_a_mark_waits_for_its_stream_only();
  test_events_are_reused();
  test_pinned_memory_is_reused();
  test_device_memory_is_reused();
  test_device_memory_comes_at_once();
  test_failures_name_the_function();
  test_graphs();
  test_priorities();
  test_a_forked_child();
  CHECK_EQ(cuda().error(), 0);
  return check::report();
}
