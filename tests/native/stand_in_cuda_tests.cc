// The stand-in for the CUDA driver, as tests see it: its settings and failures, and device memory and streams, as a
// framework would make them. Streams are given as to the driver; null is the default stream of `device`.
#include <cstring>

#include "stand_in_cuda.h"

using namespace stand_in;

extern "C" {

int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(Context** context, int device);
int cuCtxPushCurrent_v2(Context* context);
int cuCtxPopCurrent_v2(Context** context);
int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority);

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

/// Holds calls of `function` until stand_in_release(), with the lock free.
void stand_in_hold(const char* function) {
  const std::lock_guard lock(driver().mu);
  driver().held = function;
}

void stand_in_release() {
  const std::lock_guard lock(driver().mu);
  driver().held.clear();
  driver().changed.notify_all();
}

/// Lets devices have memory in the order of streams, or not.
void stand_in_pools(int on) { driver().pools = on != 0; }

/// Adds work to `stream` for the stand-in of NCCL: `step` is called with `cookie`, under the lock of the devices, until
/// it returns true, and may touch their memory by stand_in_memory().
void stand_in_add(Stream* given, bool (*step)(void* cookie), void* cookie) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  add(*given, [step, cookie, &d] {
    std::unique_lock held(d.mu, std::adopt_lock);
    bool done = false;
    while (d.broken == 0 && !(done = step(cookie))) d.changed.wait_for(held, std::chrono::milliseconds(1));
    if (!done) d.abandoned.push_back(cookie);
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

/// Returns whether other devices reach the memory at `address`, which its own always does. Needs the lock.
int stand_in_is_reachable(uint64_t address) {
  Driver& d = driver();
  const auto found = d.pooled.find(address);
  return found == d.pooled.end() || d.devices == 1 || found->second->shared ? 1 : 0;
}

/// Lets the work of `stream` go to a graph instead of the device, or ends that. Returns whether the graph is good.
int stand_in_capture(Stream* stream, int on) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  stream->captured = on != 0;
  d.captures += on != 0 ? 1 : -1;
  return std::exchange(d.spoiled, false) ? 0 : 1;
}

int stand_in_priority(const Stream* stream) { return stream->priority; }

/// Returns how many devices have a context.
int stand_in_contexts() {
  const std::lock_guard lock(driver().mu);
  return static_cast<int>(driver().contexts.size());
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

/// Returns how often pools have taken memory of a device.
int stand_in_grown() {
  const std::lock_guard lock(driver().mu);
  return driver().grown;
}

/// Returns the unused bytes that pools have kept.
size_t stand_in_kept() {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  size_t bytes = 0;
  for (const Pool* pool : d.memory_pools) bytes += pool->unused;
  return bytes;
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
  cuStreamCreateWithPriority(&made, 1, 0);
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
  const std::lock_guard lock(driver().mu);
  const uint64_t address = take_memory(bytes);
  if (address != 0) std::memset(real(address), 0xab, bytes);
  return address;
}

/// Frees memory after the work that is in `stream` now, like a framework's allocator.
void stand_in_free(uint64_t address, Stream* stream) {
  const std::lock_guard lock(driver().mu);
  return_memory(address, *stream);
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
