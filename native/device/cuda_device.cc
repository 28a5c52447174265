#include "device/cuda_device.h"

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fork.h"

namespace farandole {

CudaDevice::Current::Current(const CudaDevice& device)
    : library_(device.library_), capture_mode_(CudaLibrary::kRelaxed) {
  library_.require("cuThreadExchangeStreamCaptureMode", library_.thread_exchange_capture_mode(&capture_mode_));
  const int code = library_.ctx_push_current(device.context_);
  if (code != CudaLibrary::kSuccess) library_.thread_exchange_capture_mode(&capture_mode_);
  library_.require("cuCtxPushCurrent", code);
}

CudaDevice::Current::~Current() {
  CudaLibrary::Context popped = nullptr;
  library_.ctx_pop_current(&popped);
  library_.thread_exchange_capture_mode(&capture_mode_);
}

CudaMark::CudaMark(CudaMark&& other) noexcept : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}

CudaMark& CudaMark::operator=(CudaMark&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(event_, other.event_);
  return *this;
}

CudaMark::~CudaMark() {
  if (event_ == nullptr || fork_number() != device_->fork_number_) return;
  // A wait for an event refers to its record at the time of the call, so the event can be recorded again at once.
  const std::lock_guard lock(device_->mu_);
  device_->unused_.push_back(event_);
}

bool CudaMark::passed() const {
  const CudaDevice::Current current(*device_);
  const int code = device_->library_.event_query(event_);
  if (code == CudaLibrary::kNotReady) return false;
  device_->library_.require("cuEventQuery", code);
  return true;
}

void CudaMark::hold(CudaLibrary::Stream stream) const {
  const CudaDevice::Current current(*device_);
  device_->library_.require("cuStreamWaitEvent", device_->library_.stream_wait_event(stream, event_, 0));
}

CudaDevice& CudaDevice::of(int ordinal) {
  // Never destroyed: the driver may be shut down earlier.
  static std::mutex mu;
  static auto* devices = new std::map<int, std::unique_ptr<CudaDevice>>();
  static_cast<void>(CudaLibrary::get());  // refuses a forked child
  const std::lock_guard lock(mu);
  if (const auto found = devices->find(ordinal); found != devices->end()) return *found->second;
  return *devices->emplace(ordinal, std::unique_ptr<CudaDevice>(new CudaDevice(ordinal))).first->second;
}

CudaDevice& CudaDevice::of_stream(Stream stream) {
  const CudaLibrary& library = CudaLibrary::get();
  CudaLibrary::Context context = nullptr;
  CudaLibrary::Context popped = nullptr;
  library.require("cuStreamGetCtx", library.stream_get_ctx(stream, &context));
  library.require("cuCtxPushCurrent", library.ctx_push_current(context));
  int wanted = -1;
  const int code = library.ctx_get_device(&wanted);
  library.ctx_pop_current(&popped);
  library.require("cuCtxGetDevice", code);
  int count = 0;
  library.require("cuDeviceGetCount", library.device_get_count(&count));
  int ordinal = 0;
  for (int device = -1; ordinal < count; ++ordinal) {
    library.require("cuDeviceGet", library.device_get(&device, ordinal));
    if (device == wanted) break;
  }
  return of(ordinal);
}

CudaDevice::CudaDevice(int ordinal) : library_(CudaLibrary::get()), ordinal_(ordinal), fork_number_(fork_number()) {
  int count = 0;
  library_.require("cuDeviceGetCount", library_.device_get_count(&count));
  if (ordinal < 0 || ordinal >= count)
    throw Error::invalid("", "the tensor lies on CUDA device " + std::to_string(ordinal) + ", and this process sees " +
                                 std::to_string(count) + "; look at CUDA_VISIBLE_DEVICES");
  int device = 0;
  library_.require("cuDeviceGet", library_.device_get(&device, ordinal));
  library_.require("cuDevicePrimaryCtxRetain", library_.device_primary_ctx_retain(&context_, device));
  const std::array streams{&handover_, &to_host_, &to_device_, &returns_};
  try {
    for (Stream* each : streams) *each = make_stream();
  } catch (...) {
    for (const Stream* each : streams)
      if (*each != nullptr) end_stream(*each);
    throw;
  }
}

CudaLibrary::Stream CudaDevice::make_stream(bool urgent) {
  const Current current(*this);
  int least = 0, greatest = 0;
  library_.require("cuCtxGetStreamPriorityRange", library_.ctx_get_stream_priority_range(&least, &greatest));
  Stream made = nullptr;
  library_.require("cuStreamCreateWithPriority",
                   library_.stream_create_with_priority(&made, CudaLibrary::kNonBlocking, urgent ? greatest : least));
  return made;
}

template <class Call>
void CudaDevice::if_it_works(Call call) noexcept {
  if (fork_number() != fork_number_) return;
  try {
    const Current current(*this);
    call();
  } catch (const Error&) {
    // The driver frees the resources of a broken device when the process ends.
  }
}

void CudaDevice::end_stream(Stream stream) noexcept {
  if_it_works([&] { library_.stream_destroy(stream); });
}

int CudaDevice::handle() const {
  int device = 0;
  library_.require("cuDeviceGet", library_.device_get(&device, ordinal_));
  return device;
}

std::array<char, 16> CudaDevice::uuid() const {
  std::array<char, 16> uuid{};
  library_.require("cuDeviceGetUuid", library_.device_get_uuid(&uuid, handle()));
  return uuid;
}

void CudaDevice::require_running(Stream stream, const std::string& name) const {
  const Current current(*this);
  int status = 0;
  const int code = library_.stream_is_capturing(stream, &status);
  if (code != CudaLibrary::kCaptureImplicit) library_.require("cuStreamIsCapturing", code);
  if (code != CudaLibrary::kSuccess || status != 0)
    throw Error::invalid(name,
                         "the stream of its tensor is being captured into a CUDA graph, which an operation of several "
                         "ranks cannot be part of; capture the computation only, and call it outside");
}

CudaMark CudaDevice::mark(Stream stream) {
  const Current current(*this);
  CudaLibrary::Event event = nullptr;
  {
    const std::lock_guard lock(mu_);
    if (!unused_.empty()) {
      event = unused_.back();
      unused_.pop_back();
    }
  }
  if (event == nullptr) library_.require("cuEventCreate", library_.event_create(&event, CudaLibrary::kNoTiming));
  CudaMark made(*this, event);
  library_.require("cuEventRecord", library_.event_record(event, stream));
  return made;
}

void CudaDevice::copy_to_host(std::byte* to, Address from, size_t bytes, Stream stream) {
  const Current current(*this);
  library_.require("cuMemcpyDtoHAsync", library_.memcpy_dtoh_async(to, from, bytes, stream));
}

void CudaDevice::copy_to_device(Address to, const std::byte* from, size_t bytes, Stream stream) {
  const Current current(*this);
  library_.require("cuMemcpyHtoDAsync", library_.memcpy_htod_async(to, from, bytes, stream));
}

void CudaDevice::copy_within(Address to, Address from, size_t bytes, Stream stream) {
  const Current current(*this);
  library_.require("cuMemcpyDtoDAsync", library_.memcpy_dtod_async(to, from, bytes, stream));
}

void CudaDevice::clear(Address at, size_t bytes, Stream stream) {
  const Current current(*this);
  library_.require("cuMemsetD8Async", library_.memset_d8_async(at, 0, bytes, stream));
}

bool CudaDevice::has_memory_pools() const {
  if (library_.mem_alloc_from_pool_async == nullptr || library_.mem_free_async == nullptr ||
      library_.mem_pool_create == nullptr || library_.mem_pool_set_attribute == nullptr ||
      library_.mem_pool_set_access == nullptr || library_.mem_pool_trim_to == nullptr)
    return false;
  int has = 0;
  library_.require("cuDeviceGetAttribute", library_.device_get_attribute(&has, CudaLibrary::kMemoryPools, handle()));
  return has != 0;
}

CudaLibrary::Pool CudaDevice::pool() {
  std::call_once(pool_made_, [this] {
    CudaLibrary::PoolProperties properties;
    properties.device = handle();
    CudaLibrary::Pool made = nullptr;
    library_.require("cuMemPoolCreate", library_.mem_pool_create(&made, &properties));
    uint64_t kept = kKept;
    library_.require("cuMemPoolSetAttribute",
                     library_.mem_pool_set_attribute(made, CudaLibrary::kReleaseThreshold, &kept));
    // Otherwise an operation would wait for the stream that used the memory before. Its work may take long, or itself
    // wait for other ranks.
    int waits = 0;
    library_.require("cuMemPoolSetAttribute",
                     library_.mem_pool_set_attribute(made, CudaLibrary::kReuseByWaiting, &waits));
    pool_ = made;
  });
  return pool_;
}

void CudaDevice::share_pool() {
  int count = 0;
  library_.require("cuDeviceGetCount", library_.device_get_count(&count));
  if (count == 1) return;
  const Current current(*this);
  for (int other = 0; other < count; ++other) {
    CudaLibrary::Access access;
    int can = 0;
    library_.require("cuDeviceGet", library_.device_get(&access.device, other));
    if (other == ordinal_) continue;
    library_.require("cuDeviceCanAccessPeer", library_.device_can_access_peer(&can, access.device, handle()));
    if (can != 0) library_.require("cuMemPoolSetAccess", library_.mem_pool_set_access(pool(), &access, 1));
  }
}

CudaDevice::Address CudaDevice::allocate(size_t bytes, Stream stream) {
  const Current current(*this);
  Address made = 0;
  library_.require("cuMemAllocFromPoolAsync", library_.mem_alloc_from_pool_async(&made, bytes, pool(), stream));
  return made;
}

void CudaDevice::free(Address memory, Stream stream) noexcept {
  if_it_works([&] { library_.mem_free_async(memory, stream); });
}

void CudaDevice::free_after(Address memory, const CudaMark& last) noexcept {
  if_it_works([&] {
    last.hold(returns_);
    library_.mem_free_async(memory, returns_);
  });
}

void CudaDevice::trim_pool() noexcept {
  if (pool_ == nullptr) return;
  if_it_works([&] { library_.mem_pool_trim_to(pool_, 0); });
}

std::byte* CudaDevice::allocate_pinned(size_t bytes) {
  const Current current(*this);
  void* memory = nullptr;
  library_.require("cuMemHostAlloc", library_.mem_host_alloc(&memory, bytes, CudaLibrary::kPortable));
  return static_cast<std::byte*>(memory);
}

void CudaDevice::free_pinned(std::byte* memory) noexcept {
  if_it_works([&] { library_.mem_free_host(memory); });
}

}  // namespace farandole
