#include "device/cuda_library.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>

#include "base/error.h"
#include "base/fork.h"

namespace farandole {
namespace {

constexpr const char* kFile = "libcuda.so.1";

[[noreturn]] void refuse(const std::string& problem) {
  throw Error::invalid("", "the tensor lies on a GPU, and the CUDA driver cannot be used: " + problem);
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

template <class Function>
void find_newer(void* loaded, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(loaded, name));
}

template <class Function>
void find(void* loaded, const char* file, const char* name, Function*& function) {
  void* found = ::dlsym(loaded, name);
  if (found == nullptr)
    refuse(std::string(file) + " has no " + name + "; NVIDIA's driver for CUDA " + version_text(CudaLibrary::kOldest) +
           " or later is needed");
  function = reinterpret_cast<Function*>(found);
}

}  // namespace

const CudaLibrary& CudaLibrary::get() {
  // Never destroyed: threads may call it while the process exits.
  static std::mutex mu;
  static const CudaLibrary* library = nullptr;
  static uint32_t opened_by = 0;
  const std::lock_guard lock(mu);
  if (library == nullptr) {
    library = new CudaLibrary(kFile);
    opened_by = fork_number();
  }
  if (opened_by != fork_number())
    refuse(
        "this process was forked from one that uses it, which CUDA does not allow; start processes by spawn, or "
        "before the first use of a GPU");
  return *library;
}

CudaLibrary::CudaLibrary(const char* file) {
  // Never closed: the driver cannot be unloaded from a process.
  void* loaded = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr)
    refuse(std::string(file) + " cannot be loaded (" + ::dlerror() +
           "); install NVIDIA's driver, or start the container with its GPUs");
  find_functions(loaded, file);
  if (const int code = init(0); code != kSuccess)
    refuse(text_of("cuInit", code) +
           "; nvidia-smi says whether the driver works, and CUDA_VISIBLE_DEVICES which GPUs this process may see");
  if (const int code = driver_get_version(&version); code != kSuccess) refuse(text_of("cuDriverGetVersion", code));
  if (version < kOldest)
    refuse("NVIDIA's driver supports CUDA " + version_text(version) + ", and " + version_text(kOldest) +
           " or later is needed; update the driver");
}

void CudaLibrary::find_functions(void* loaded, const char* file) {
  find(loaded, file, "cuInit", init);
  find(loaded, file, "cuDriverGetVersion", driver_get_version);
  find(loaded, file, "cuGetErrorName", get_error_name);
  find(loaded, file, "cuGetErrorString", get_error_string);
  find(loaded, file, "cuDeviceGetCount", device_get_count);
  find(loaded, file, "cuDeviceGet", device_get);
  find(loaded, file, "cuDeviceGetAttribute", device_get_attribute);
  find(loaded, file, "cuDeviceGetUuid", device_get_uuid);
  find(loaded, file, "cuDevicePrimaryCtxRetain", device_primary_ctx_retain);
  find(loaded, file, "cuCtxPushCurrent_v2", ctx_push_current);
  find(loaded, file, "cuCtxPopCurrent_v2", ctx_pop_current);
  find(loaded, file, "cuCtxGetDevice", ctx_get_device);
  find(loaded, file, "cuCtxGetStreamPriorityRange", ctx_get_stream_priority_range);
  find(loaded, file, "cuDeviceCanAccessPeer", device_can_access_peer);
  find(loaded, file, "cuThreadExchangeStreamCaptureMode", thread_exchange_capture_mode);
  find(loaded, file, "cuStreamCreateWithPriority", stream_create_with_priority);
  find(loaded, file, "cuStreamIsCapturing", stream_is_capturing);
  find(loaded, file, "cuStreamDestroy_v2", stream_destroy);
  find(loaded, file, "cuStreamGetCtx", stream_get_ctx);
  find(loaded, file, "cuStreamWaitEvent", stream_wait_event);
  find(loaded, file, "cuEventCreate", event_create);
  find(loaded, file, "cuEventRecord", event_record);
  find(loaded, file, "cuEventQuery", event_query);
  find(loaded, file, "cuMemHostAlloc", mem_host_alloc);
  find(loaded, file, "cuMemFreeHost", mem_free_host);
  find(loaded, file, "cuMemcpyDtoHAsync_v2", memcpy_dtoh_async);
  find(loaded, file, "cuMemcpyHtoDAsync_v2", memcpy_htod_async);
  find(loaded, file, "cuMemcpyDtoDAsync_v2", memcpy_dtod_async);
  find(loaded, file, "cuMemsetD8Async", memset_d8_async);
  find_newer(loaded, "cuMemAllocFromPoolAsync", mem_alloc_from_pool_async);
  find_newer(loaded, "cuMemFreeAsync", mem_free_async);
  find_newer(loaded, "cuMemPoolCreate", mem_pool_create);
  find_newer(loaded, "cuMemPoolSetAttribute", mem_pool_set_attribute);
  find_newer(loaded, "cuMemPoolSetAccess", mem_pool_set_access);
  find_newer(loaded, "cuMemPoolTrimTo", mem_pool_trim_to);
}

std::string CudaLibrary::text_of(const char* function, int code) const {
  const char* name = nullptr;
  const char* text = nullptr;
  std::string all = std::string(function) + " failed: ";
  if (get_error_name(code, &name) != kSuccess || name == nullptr) return all + "code " + std::to_string(code);
  all += std::string(name) + " (" + std::to_string(code) + ")";
  if (get_error_string(code, &text) == kSuccess && text != nullptr) all += std::string(": ") + text;
  return all;
}

void CudaLibrary::require(const char* function, int code) const {
  if (code != kSuccess) throw Error::fabric("", text_of(function, code));
}

}  // namespace farandole
