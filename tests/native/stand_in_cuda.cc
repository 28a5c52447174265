// A library with functions of the CUDA driver whose devices are memory of this machine, for tests without a GPU; see
// stand_in_cuda.h. The tests' own functions, which begin with stand_in_, are in stand_in_cuda_tests.cc.
#include "stand_in_cuda.h"

#include <algorithm>
#include <cstring>

using namespace stand_in;

namespace {

struct PoolAccess {
  int kind, device, flags;
};

struct PoolProperties {
  int type, handles, kind, device;
  void* security;
  char reserved[64];
};

/// Copies in `stream` after a check of both ranges.
int copy(const char* function, uint64_t device, uint64_t host, size_t bytes, Stream* given, bool to_host) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal(function)) return code;
  Stream* stream = stream_of(given);
  if (current.empty() || stream == nullptr) return kInvalidContext;
  if (stream->device != current.back()->device) return kInvalidHandle;
  if (const int code = refusal_of_capture(*stream)) return code;
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

/// Adds work on device memory to the stream, after a check of the range. Needs the lock.
int in_memory(uint64_t at, size_t bytes, Stream* given, std::function<void()> work) {
  Driver& d = driver();
  Stream* stream = stream_of(given);
  if (stream == nullptr || current.empty()) return kInvalidContext;
  if (stream->device != current.back()->device) return kInvalidHandle;
  if (const int code = refusal_of_capture(*stream)) return code;
  if (!holds(d.live, at, bytes)) return kInvalidValue;
  add(*stream, [=, &d] {
    if (d.broken != 0) return;
    if (holds(d.live, at, bytes)) work();
    else d.broken = kIllegalAddress;
  });
  return 0;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (d.initialized == 0) d.initialized = getpid();
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

int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == kMemoryPools && driver().pools ? 1 : 0;
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

int cuCtxGetDevice(int* device) {
  if (current.empty()) return kInvalidContext;
  *device = current.back()->device;
  return 0;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (current.empty()) return kInvalidContext;
  *least = 0;
  *greatest = -5;
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}

int cuStreamIsCapturing(Stream* given, int* status) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuStreamIsCapturing")) return code;
  const Stream* stream = stream_of(given);
  if (stream == nullptr) return kInvalidContext;
  *status = stream->captured ? 1 : 0;
  return 0;
}

int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuStreamCreateWithPriority")) return code;
  if (current.empty() || flags != 1) return kInvalidContext;
  d.streams.push_back(std::make_unique<Stream>());
  *stream = d.streams.back().get();
  (*stream)->device = current.back()->device;
  (*stream)->priority = priority;
  return 0;
}

int cuStreamDestroy_v2(Stream* stream) {  // its thread and its work stay
  const std::lock_guard lock(driver().mu);
  ++driver().calls["cuStreamDestroy"];
  if (current.empty()) return kInvalidContext;
  if (stream == nullptr || stream->ended) return kInvalidHandle;
  stream->ended = true;
  return 0;
}

int cuStreamGetCtx(Stream* given, Context** context) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuStreamGetCtx")) return code;
  const Stream* stream = stream_of(given);
  if (stream == nullptr) return kInvalidContext;
  *context = d.contexts[stream->device].get();
  return 0;
}

int cuStreamWaitEvent(Stream* given, Event* event, unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuStreamWaitEvent")) return code;
  Stream* stream = stream_of(given);
  if (stream == nullptr) return kInvalidContext;
  if (const int code = refusal_of_capture(*stream)) return code;
  const std::shared_ptr<Moment> moment = event->recorded;
  if (moment == nullptr) return 0;  // as in CUDA: there is nothing to wait for
  add_wait(*stream, moment);
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
  if (const int code = refusal_of_capture(*stream)) return code;
  event->recorded = std::make_shared<Moment>();
  add(*stream, [moment = event->recorded] { moment->passed = true; });
  return 0;
}

int cuEventQuery(Event* event) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal_of_unsafe("cuEventQuery")) return code;
  return event->recorded == nullptr || event->recorded->passed ? 0 : kNotReady;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal_of_unsafe("cuMemHostAlloc")) return code;
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
  if (const int code = refusal_of_unsafe("cuMemFreeHost"); code == kCaptureUnsupported) return code;
  if (d.pinned.erase(reinterpret_cast<uint64_t>(memory)) == 0) return kInvalidValue;
  std::free(memory);
  return 0;
}

/// The memory holds garbage once the stream has come to this, so that earlier writes to it are lost.
int cuMemAllocFromPoolAsync(uint64_t* made, size_t bytes, Pool* pool, Stream* given) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuMemAllocFromPoolAsync")) return code;
  Stream* stream = stream_of(given);
  if (stream == nullptr) return kInvalidContext;
  if (const int code = refusal_of_capture(*stream)) return code;
  if (bytes == 0 || d.memory_pools.count(pool) == 0 || pool->device != stream->device) return kInvalidValue;
  *made = take_memory(bytes);
  if (*made == 0) return kOutOfMemory;
  d.pooled[*made] = pool;
  const size_t taken = d.live[*made];
  if (pool->unused >= taken) pool->unused -= taken;
  else ++d.grown;
  if (pool->waits && pool->freed) add_wait(*stream, pool->freed);
  add(*stream, [address = *made, bytes] { std::memset(real(address), 0xab, bytes); });
  return 0;
}

int cuMemFreeAsync(uint64_t address, Stream* given) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuMemFreeAsync")) return code;
  Stream* stream = stream_of(given);
  if (stream == nullptr) return kInvalidContext;
  if (const int code = refusal_of_capture(*stream)) return code;
  const auto found = d.pooled.find(address);
  if (d.live.count(address) == 0 || found == d.pooled.end()) return kInvalidValue;
  Pool* pool = found->second;
  const size_t bytes = d.live[address];
  d.pooled.erase(found);
  return_memory(address, *stream);
  // As if a stream were waited for at once.
  pool->freed = std::make_shared<Moment>();
  add(*stream, [pool, bytes, moment = pool->freed] {
    pool->unused = std::min<uint64_t>(pool->unused + bytes, pool->threshold);
    moment->passed = true;
  });
  return 0;
}

int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer ? 1 : 0;
  return 0;
}

int cuMemPoolCreate(Pool** pool, const PoolProperties* properties) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal_of_unsafe("cuMemPoolCreate")) return code;
  if (properties->type != 1 || properties->handles != 0 || properties->kind != 1 || properties->security != nullptr ||
      properties->device < 0 || properties->device >= d.devices ||
      std::any_of(properties->reserved, properties->reserved + 64, [](char each) { return each != 0; }))
    return kInvalidValue;
  *pool = new Pool{properties->device};
  d.memory_pools.insert(*pool);
  return 0;
}

int cuMemPoolSetAttribute(Pool* pool, int attribute, void* value) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuMemPoolSetAttribute")) return code;
  if (d.memory_pools.count(pool) == 0) return kInvalidValue;
  if (attribute == 3) pool->waits = *static_cast<const int*>(value) != 0;
  else if (attribute == 4) std::memcpy(&pool->threshold, value, sizeof pool->threshold);
  else return kInvalidValue;
  return 0;
}

int cuMemPoolTrimTo(Pool* pool, size_t kept) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuMemPoolTrimTo")) return code;
  if (d.memory_pools.count(pool) == 0) return kInvalidValue;
  pool->unused = std::min<uint64_t>(pool->unused, kept);
  return 0;
}

int cuMemPoolSetAccess(Pool* pool, const PoolAccess* access, size_t count) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuMemPoolSetAccess")) return code;
  if (count != 1 || access->kind != 1 || access->flags != 3 || access->device == pool->device) return kInvalidValue;
  pool->shared = true;
  return 0;
}

int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, Stream* given) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuMemsetD8Async")) return code;
  return in_memory(at, bytes, given, [=] { std::memset(real(at), value, bytes); });
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* given) {
  Driver& d = driver();
  const std::lock_guard lock(d.mu);
  if (const int code = refusal("cuMemcpyDtoDAsync")) return code;
  if (!holds(d.live, from, bytes)) return kInvalidValue;
  return in_memory(to, bytes, given, [=] { std::memmove(real(to), real(from), bytes); });
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
  return copy("cuMemcpyDtoHAsync", from, reinterpret_cast<uint64_t>(to), bytes, stream, true);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  return copy("cuMemcpyHtoDAsync", to, reinterpret_cast<uint64_t>(from), bytes, stream, false);
}

}  // extern "C"
