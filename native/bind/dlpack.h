#pragma once

#include <cstdint>

/// The part of the DLPack 1.x C interface that describes a tensor. DLPack is a stable C ABI (github.com/dmlc/dlpack);
/// declared here so that the build needs no framework's headers.
namespace farandole::dlpack {

struct Device {
  int32_t type;
  int32_t id;
};
inline constexpr int32_t kCpu = 1;
inline constexpr int32_t kCuda = 2;
inline constexpr int32_t kCpuPinned = 3;     // by CUDA
inline constexpr int32_t kCudaManaged = 13;  // memory that CUDA moves between CPU and GPU

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null when contiguous
  uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  uint32_t major, minor;
};

/// The struct behind `type(tensor).__dlpack_c_exchange_api__`, from DLPack 1.3 on; only the last two functions are
/// used.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  /// Fills `out` with borrowed pointers, valid while the object lives unchanged. Returns 0, or -1 with a Python error
  /// set.
  int (*tensor_from_object)(void* object, Tensor* out);
  /// Sets `out` to the stream in which the calling thread works on the device. Returns as above. May be null.
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace farandole::dlpack
