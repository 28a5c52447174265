#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace farandole {

/// The functions of the CUDA driver (libcuda.so.1), opened at run time and called without its headers.
///
/// This is the driver's API, not the runtime's: its file has one name on all systems, and frameworks use its primary
/// contexts.
class CudaLibrary {
 public:
  struct ContextObject;
  struct StreamObject;
  struct EventObject;
  using Context = ContextObject*;
  using Stream = StreamObject*;  // null: the legacy default stream of the current context
  using Event = EventObject*;
  using Pool = struct PoolObject*;
  using Address = uint64_t;  // of device memory

  /// Returns the driver, opened by its name and initialized; one object per process. Throws Error (Invalid), whose
  /// reason says what to do, if there is no driver or no device, if the driver is too old, or if this process is a
  /// forked child of one that uses the driver. The next call repeats a failed attempt.
  static const CudaLibrary& get();

  /// Opens `file`. Throws as get() does.
  explicit CudaLibrary(const char* file);
  CudaLibrary(const CudaLibrary&) = delete;
  CudaLibrary& operator=(const CudaLibrary&) = delete;

  /// Throws Error (Fabric) unless `code` is a success.
  void require(const char* function, int code) const;
  /// Returns the text of an error code: "cuInit failed: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device ...".
  [[nodiscard]] std::string text_of(const char* function, int code) const;

  static constexpr int kSuccess = 0;
  static constexpr int kNotReady = 600;         // CUDA_ERROR_NOT_READY
  static constexpr int kCaptureImplicit = 906;  // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: while another stream captures
  static constexpr unsigned kNonBlocking = 1;   // CU_STREAM_NON_BLOCKING: no implicit order with the default stream
  static constexpr unsigned kNoTiming = 2;      // CU_EVENT_DISABLE_TIMING
  static constexpr unsigned kPortable = 1;      // CU_MEMHOSTALLOC_PORTABLE: pinned for all contexts
  static constexpr int kOldest = 11000;         // CUDA 11.0, by cuDriverGetVersion
  static constexpr int kMemoryPools = 115;      // CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
  static constexpr int kRelaxed = 2;            // CU_STREAM_CAPTURE_MODE_RELAXED
  static constexpr int kOnDevice = 1;           // CU_MEM_LOCATION_TYPE_DEVICE
  static constexpr int kReadWrite = 3;          // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
  static constexpr int kReuseByWaiting = 3;     // CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
  static constexpr int kReleaseThreshold = 4;   // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

  struct Access {  // CUmemAccessDesc
    int kind = kOnDevice;
    int device = 0;
    int flags = kReadWrite;
  };

  struct PoolProperties {  // CUmemPoolProps; zeros request nothing
    int type = 1;          // CU_MEM_ALLOCATION_TYPE_PINNED: memory of the device
    int handles = 0;       // CU_MEM_HANDLE_TYPE_NONE: for this process only
    int kind = kOnDevice;
    int device = 0;
    void* security = nullptr;
    std::array<char, 64> reserved{};
  };

  int version = 0;  // 12040 for CUDA 12.4

  int (*init)(unsigned flags);
  int (*driver_get_version)(int* version);
  int (*get_error_name)(int code, const char** text);
  int (*get_error_string)(int code, const char** text);
  int (*device_get_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_get_attribute)(int* value, int attribute, int device);
  int (*device_get_uuid)(std::array<char, 16>* uuid, int device);
  int (*device_primary_ctx_retain)(Context* context, int device);
  int (*ctx_push_current)(Context context);
  int (*ctx_pop_current)(Context* context);
  int (*ctx_get_device)(int* device);
  int (*ctx_get_stream_priority_range)(int* least, int* greatest);
  int (*device_can_access_peer)(int* can, int device, int peer);
  int (*thread_exchange_capture_mode)(int* mode);
  int (*stream_create_with_priority)(Stream* stream, unsigned flags, int priority);
  int (*stream_is_capturing)(Stream stream, int* status);
  int (*stream_destroy)(Stream stream);
  int (*stream_get_ctx)(Stream stream, Context* context);
  int (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  int (*event_create)(Event* event, unsigned flags);
  int (*event_record)(Event event, Stream stream);
  int (*event_query)(Event event);
  int (*mem_host_alloc)(void** memory, size_t bytes, unsigned flags);
  int (*mem_free_host)(void* memory);
  int (*memcpy_dtoh_async)(void* to, Address from, size_t bytes, Stream stream);
  int (*memcpy_htod_async)(Address to, const void* from, size_t bytes, Stream stream);
  int (*memcpy_dtod_async)(Address to, Address from, size_t bytes, Stream stream);
  int (*memset_d8_async)(Address at, unsigned char value, size_t bytes, Stream stream);
  // Null before CUDA 11.2:
  int (*mem_alloc_from_pool_async)(Address* made, size_t bytes, Pool pool, Stream stream);
  int (*mem_free_async)(Address address, Stream stream);
  int (*mem_pool_create)(Pool* pool, const PoolProperties* properties);
  int (*mem_pool_set_attribute)(Pool pool, int attribute, void* value);
  int (*mem_pool_set_access)(Pool pool, const Access* access, size_t count);
  int (*mem_pool_trim_to)(Pool pool, size_t kept);

 private:
  void find_functions(void* loaded, const char* file);
};

}  // namespace farandole
