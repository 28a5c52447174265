// A library with functions of the CUDA driver whose devices are memory of this machine, for tests without a GPU.
//
// Streams are threads that run their work later, after a random delay, and in no order with each other: a missing wait
// gives a wrong result. Addresses of device memory may not be touched: the addresses that it hands out are mapped
// without access, and streams use a second mapping. New memory and freed memory hold garbage. Work that touches freed
// memory, or host memory that is not pinned, breaks the device, as in CUDA. The own functions begin with stand_in_.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidDevice = 101, kInvalidContext = 201,
              kInvalidHandle = 400, kNotReady = 600, kIllegalAddress = 700;
constexpr size_t kMemory = size_t{1} << 30;  // unused pages cost nothing
constexpr size_t kSmallest = 256;

/// The moment that a record of an event stands for.
struct Moment {
  bool passed = false;
};

struct Stream {
  int device = 0;
  std::deque<std::function<void()>> work;
  bool begun = false;               // has a thread
  std::condition_variable arrived;  // there is work; one each, as many streams sleep
};

struct Context {
  int device = 0;
  Stream legacy;
};

struct Event {
  int device = 0;
  std::shared_ptr<Moment> recorded;
};

/// All state. Never destroyed, because the threads of streams live until the process ends.
struct Driver {
  std::mutex mu;                    // guards all members, and orders the work of streams with other threads
  std::condition_variable changed;  // work is done
  int version = 12040;
  int devices = 1;
  std::atomic<int> slowest_us{200};
  int broken = 0;                    // an error that stays
  std::atomic<bool> one_gpu{false};  // all devices are the same GPU
  bool initialized = false;
  std::map<std::string, std::pair<int, int>> failures;  // by function: code, calls before it
  std::map<std::string, int> calls;
  std::map<int, std::unique_ptr<Context>> contexts;
  std::byte* shown = nullptr;  // without access
  std::byte* real = nullptr;
  size_t used = 0;
  std::map<uint64_t, size_t> live;                      // device memory: address, bytes
  std::map<size_t, std::vector<uint64_t>> free_blocks;  // by size
  std::map<uint64_t, size_t> pinned;
};

Driver& driver() {
  static auto* made = new Driver;
  return *made;
}

thread_local std::vector<Context*> current;

/// Returns the error that a call of `function` has to return, 0 for none. Needs the lock.
int refusal(const char* function) {
  Driver& d = driver();
  const int made = d.calls[function]++;
  if (const auto found = d.failures.find(function); found != d.failures.end() && made >= found->second.second)
    return found->second.first;
  if (!d.initialized) return kNotInitialized;
  return d.broken;
}

bool holds(const std::map<uint64_t, size_t>& ranges, uint64_t address, size_t bytes) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  const auto& [begin, size] = *--after;
  return address - begin + bytes <= size;
}

std::byte* real(uint64_t address) { return driver().real + (address - reinterpret_cast<uint64_t>(driver().shown)); }

void map_memory() {
  Driver& d = driver();
  const int file = memfd_create("stand-in device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kMemory) != 0) std::abort();
  const auto map = [file](int access) {
    void* at = mmap(nullptr, kMemory, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) std::abort();
    return static_cast<std::byte*>(at);
  };
  d.shown = map(PROT_NONE);
  d.real = map(PROT_READ | PROT_WRITE);
  close(file);
}

void run(Stream* stream) {
  Driver& d = driver();
  std::mt19937 random(static_cast<unsigned>(reinterpret_cast<uintptr_t>(stream) >> 4));
  std::unique_lock lock(d.mu);
  while (true) {
    stream->arrived.wait(lock, [&] { return !stream->work.empty(); });
    const int slowest = d.slowest_us;
    lock.unlock();
    if (slowest > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(slowest)));
    lock.lock();
    // Waits of streams release the lock, so the work stays in the queue until it is done.
    const std::function<void()> next = stream->work.front();
    next();
    stream->work.pop_front();
    d.changed.notify_all();
  }
}

/// Needs the lock. The work runs with the lock, too.
void add(Stream& stream, std::function<void()> work) {
  stream.work.push_back(std::move(work));
  if (!stream.begun) {
    stream.begun = true;
    std::thread(run, &stream).detach();
  }
  stream.arrived.notify_all();
}

/// Returns null without a current context. Needs the lock.
Stream* stream_of(Stream* given) {
  if (given != nullptr) return given;
  return current.empty() ? nullptr : &current.back()->legacy;
}

/// Copies in `stream` after a check of both ranges.
int copy(const char* function, uint64_t device, uint64_t host, size_t bytes, Stream* given, bool to_host) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal(function)) return code;
  Stream* stream = stream_of(given);
  if (current.empty() || stream == nullptr) return kInvalidContext;
  if (stream->device != current.back()->device) return kInvalidHandle;
  if (!holds(d.pinned, host, bytes) || !holds(d.live, device, bytes)) return kInvalidValue;
  add(*stream, [=, &d] {
    if (d.broken != 0) return;
    if (!holds(d.pinned, host, bytes) || !holds(d.live, device, bytes)) {
      d.broken = kIllegalAddress;
      return;
    }
    auto* memory = reinterpret_cast<std::byte*>(host);
    if (to_host) std::memcpy(memory, real(device), bytes);
    else std::memcpy(real(device), memory, bytes);
  });
  return 0;
}

}  // namespace

extern "C" {

// The driver's functions.

int cuInit(unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  d.initialized = true;
  if (d.shown == nullptr) map_memory();
  return refusal("cuInit");
}

int cuDriverGetVersion(int* version) {
  *version = driver().version;
  return 0;
}

int cuGetErrorName(int code, const char** text) {
  static const std::map<int, const char*> names = {{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                   {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {100, "CUDA_ERROR_NO_DEVICE"},
                                                   {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"}};
  const auto found = names.find(code);
  *text = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : 0;
}

int cuGetErrorString(int code, const char** text) {
  *text = code == 100 ? "no CUDA-capable device is detected" : "the stand-in says so";
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = driver().devices;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < driver().devices ? 0 : kInvalidDevice;
}

int cuDeviceGetUuid(char* uuid, int device) {
  std::memset(uuid, 0, 16);
  uuid[0] = static_cast<char>(1 + (driver().one_gpu ? 0 : device));
  return 0;
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuDevicePrimaryCtxRetain")) return code;
  std::unique_ptr<Context>& made = d.contexts[device];
  if (made == nullptr) {
    made = std::make_unique<Context>();
    made->device = made->legacy.device = device;
  }
  *context = made.get();
  return 0;
}

int cuCtxPushCurrent_v2(Context* context) {
  current.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(Context** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}

int cuStreamCreate(Stream** stream, unsigned flags) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuStreamCreate")) return code;
  if (current.empty() || flags != 1) return kInvalidContext;
  *stream = new Stream;
  (*stream)->device = current.back()->device;
  return 0;
}

int cuStreamDestroy_v2(Stream* stream) {  // its thread stays
  return stream == nullptr ? kInvalidHandle : 0;
}

int cuStreamWaitEvent(Stream* given, Event* event, unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuStreamWaitEvent")) return code;
  Stream* stream = stream_of(given);
  if (stream == nullptr) return kInvalidContext;
  const std::shared_ptr<Moment> moment = event->recorded;
  if (moment == nullptr) return 0;  // as in CUDA: there is nothing to wait for
  add(*stream, [moment, &d] {
    std::unique_lock held(d.mu, std::adopt_lock);
    d.changed.wait(held, [&] { return moment->passed; });
    held.release();
  });
  return 0;
}

int cuEventCreate(Event** event, unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuEventCreate")) return code;
  if (current.empty()) return kInvalidContext;
  *event = new Event{current.back()->device, nullptr};
  return 0;
}

int cuEventRecord(Event* event, Stream* given) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuEventRecord")) return code;
  Stream* stream = stream_of(given);
  if (stream == nullptr) return kInvalidContext;
  if (stream->device != event->device) return kInvalidHandle;
  event->recorded = std::make_shared<Moment>();
  add(*stream, [moment = event->recorded] { moment->passed = true; });
  return 0;
}

int cuEventQuery(Event* event) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuEventQuery")) return code;
  return event->recorded == nullptr || event->recorded->passed ? 0 : kNotReady;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuMemHostAlloc")) return code;
  if (current.empty()) return kInvalidContext;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*memory == nullptr) return kOutOfMemory;
  std::memset(*memory, 0xcd, bytes);
  d.pinned[reinterpret_cast<uint64_t>(*memory)] = bytes;
  return 0;
}

int cuMemFreeHost(void* memory) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (d.pinned.erase(reinterpret_cast<uint64_t>(memory)) == 0) return kInvalidValue;
  std::free(memory);
  return 0;
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
  return copy("cuMemcpyDtoHAsync", from, reinterpret_cast<uint64_t>(to), bytes, stream, true);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  return copy("cuMemcpyHtoDAsync", to, reinterpret_cast<uint64_t>(from), bytes, stream, false);
}

// Device memory and streams for tests, as a framework would make them. Streams are given as to the driver; null is the
// default stream of `device`.

/// Sets the number of devices, CUDA's version, and the longest delay of work in a stream, in microseconds.
void stand_in_configure(int devices, int version, int slowest_us) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  d.devices = devices;
  d.version = version;
  d.slowest_us = slowest_us;
}

/// Makes calls of `function` return `code` after `calls` more; 0 ends it.
void stand_in_fail(const char* function, int code, int calls) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (code == 0) d.failures.erase(function);
  else d.failures[function] = {code, d.calls[function] + calls};
}

/// Makes all devices parts of the same GPU.
void stand_in_share(int shared) { driver().one_gpu = shared != 0; }

/// Adds work to `stream` for the stand-in of NCCL: `step` is called with `cookie`, under the lock of the devices, until
/// it returns true, and may touch their memory by stand_in_memory().
void stand_in_add(Stream* given, bool (*step)(void* cookie), void* cookie) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  add(*given, [step, cookie, &d] {
    std::unique_lock held(d.mu, std::adopt_lock);
    while (d.broken == 0 && !step(cookie)) d.changed.wait_for(held, std::chrono::milliseconds(1));
    held.release();
    d.changed.notify_all();
  });
}

/// Returns the memory behind an address; null if `bytes` there are not allocated. Needs the lock.
void* stand_in_memory(uint64_t address, size_t bytes) {
  if (holds(driver().live, address, bytes)) return real(address);
  driver().broken = kIllegalAddress;
  return nullptr;
}

/// Gives all devices an error that stays, 0 for none.
void stand_in_break(int code) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  d.broken = code;
  d.changed.notify_all();
}

int stand_in_error() {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  return d.broken;
}

/// Returns how often `function` was called.
int stand_in_calls(const char* function) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  return d.calls[function];
}

size_t stand_in_pinned() {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  size_t bytes = 0;
  for (const auto& [address, size] : d.pinned) bytes += size;
  return bytes;
}

size_t stand_in_live() {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  return d.live.size();
}

Stream* stand_in_stream(int device) {
  cuInit(0);
  Context* context = nullptr;
  cuDevicePrimaryCtxRetain(&context, device);
  cuCtxPushCurrent_v2(context);
  Stream* made = nullptr;
  cuStreamCreate(&made, 1);
  cuCtxPopCurrent_v2(&context);
  return made;
}

/// Returns the default stream of `device` as an object, for stand_in_*; the driver knows it as null.
Stream* stand_in_default_stream(int device) {
  cuInit(0);
  Context* context = nullptr;
  cuDevicePrimaryCtxRetain(&context, device);
  return &context->legacy;
}

/// Returns device memory that holds garbage; 0 when there is none left.
uint64_t stand_in_allocate(size_t bytes) {
  cuInit(0);
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  size_t size = kSmallest;
  while (size < bytes) size *= 2;
  std::vector<uint64_t>& blocks = d.free_blocks[size];
  uint64_t address = 0;
  if (!blocks.empty()) {
    address = blocks.back();
    blocks.pop_back();
  } else {
    if (d.used + size > kMemory) return 0;
    address = reinterpret_cast<uint64_t>(d.shown) + d.used;
    d.used += size;
  }
  d.live[address] = size;
  std::memset(real(address), 0xab, bytes);
  return address;
}

/// Frees memory after the work that is in `stream` now, like a framework's allocator.
void stand_in_free(uint64_t address, Stream* stream) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  add(*stream, [address, &d] {
    const auto found = d.live.find(address);
    std::memset(real(address), 0xef, found->second);
    d.free_blocks[found->second].push_back(address);
    d.live.erase(found);
  });
}

/// Writes later, in `stream`, what `from` holds now.
void stand_in_write(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  const auto* data = static_cast<const std::byte*>(from);
  add(*stream, [to, values = std::vector<std::byte>(data, data + bytes)] {
    if (!values.empty()) std::memcpy(real(to), values.data(), values.size());
  });
}

/// Reads in `stream`, and waits for it.
void stand_in_read(uint64_t from, void* to, size_t bytes, Stream* stream) {
  Driver& d = driver();
  std::unique_lock lock(d.mu);
  bool done = false;
  add(*stream, [&] {
    if (bytes > 0) std::memcpy(to, real(from), bytes);
    done = true;
  });
  d.changed.wait(lock, [&] { return done; });
}

/// Makes the later work in `stream` wait for the present work in `before`.
void stand_in_order(Stream* stream, Stream* before) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  const auto moment = std::make_shared<Moment>();
  add(*before, [moment] { moment->passed = true; });
  add(*stream, [moment, &d] {
    std::unique_lock held(d.mu, std::adopt_lock);
    d.changed.wait(held, [&] { return moment->passed; });
    held.release();
  });
}

/// Keeps `stream` busy until stand_in_open(); returns the key.
void* stand_in_close(Stream* stream) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  auto* moment = new std::shared_ptr<Moment>(std::make_shared<Moment>());
  add(*stream, [kept = *moment, &d] {
    std::unique_lock held(d.mu, std::adopt_lock);
    d.changed.wait(held, [&] { return kept->passed; });
    held.release();
  });
  return moment;
}

void stand_in_open(void* key) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  auto* moment = static_cast<std::shared_ptr<Moment>*>(key);
  (*moment)->passed = true;
  delete moment;
  d.changed.notify_all();
}

}  // extern "C"
