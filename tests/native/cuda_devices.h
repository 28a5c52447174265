// The stand-in for the CUDA driver, and tensors in its devices' memory.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "device/cuda_device.h"

namespace check {

using farandole::CudaDevice;

/// The stand-in's own functions. Loading it by its path makes it the library "libcuda.so.1" of this process.
struct StandInCuda {
  using Stream = CudaDevice::Stream;

  void* loaded = ::dlopen(STAND_IN_CUDA, RTLD_NOW | RTLD_LOCAL);
  void (*configure)(int devices, int version, int slowest_us) = find<decltype(configure)>("stand_in_configure");
  void (*fail)(const char* function, int code, int calls) = find<decltype(fail)>("stand_in_fail");
  void (*break_devices)(int code) = find<decltype(break_devices)>("stand_in_break");
  void (*hold)(const char* function) = find<decltype(hold)>("stand_in_hold");
  void (*release)() = find<decltype(release)>("stand_in_release");
  void (*share)(int shared) = find<decltype(share)>("stand_in_share");
  void (*pools)(int on) = find<decltype(pools)>("stand_in_pools");
  size_t (*live)() = find<decltype(live)>("stand_in_live");
  int (*error)() = find<decltype(error)>("stand_in_error");
  int (*calls)(const char* function) = find<decltype(calls)>("stand_in_calls");
  int (*grown)() = find<decltype(grown)>("stand_in_grown");
  size_t (*kept)() = find<decltype(kept)>("stand_in_kept");
  size_t (*pinned)() = find<decltype(pinned)>("stand_in_pinned");
  Stream (*stream)(int device) = find<decltype(stream)>("stand_in_stream");
  Stream (*default_stream)(int device) = find<decltype(default_stream)>("stand_in_default_stream");
  uint64_t (*allocate)(size_t bytes) = find<decltype(allocate)>("stand_in_allocate");
  void (*free_later)(uint64_t address, Stream stream) = find<decltype(free_later)>("stand_in_free");
  void (*write)(uint64_t to, const void* from, size_t bytes, Stream stream) = find<decltype(write)>("stand_in_write");
  void (*read)(uint64_t from, void* to, size_t bytes, Stream stream) = find<decltype(read)>("stand_in_read");
  void* (*close)(Stream stream) = find<decltype(close)>("stand_in_close");
  void (*open)(void* key) = find<decltype(open)>("stand_in_open");
  int (*capture)(Stream stream, int on) = find<decltype(capture)>("stand_in_capture");
  int (*priority)(Stream stream) = find<decltype(priority)>("stand_in_priority");
  int (*contexts)() = find<decltype(contexts)>("stand_in_contexts");

  template <class F>
  F find(const char* name) const {
    void* found = ::dlsym(loaded, name);
    if (found == nullptr) std::abort();
    return reinterpret_cast<F>(found);
  }
};

inline const StandInCuda& cuda() {
  static const StandInCuda made;
  return made;
}

/// Numbers in the memory of a device, written and read in a stream of their own, later than the call.
class DeviceNumbers {
 public:
  explicit DeviceNumbers(const std::vector<float>& values, int device = 0)
      : device_(CudaDevice::of(device)), count_(values.size()), address_(cuda().allocate(bytes())) {
    stream_ = cuda().stream(device);
    cuda().write(address_, values.data(), bytes(), stream_);
  }
  ~DeviceNumbers() { cuda().free_later(address_, stream_); }
  DeviceNumbers(const DeviceNumbers&) = delete;
  DeviceNumbers& operator=(const DeviceNumbers&) = delete;

  [[nodiscard]] CudaDevice& device() const { return device_; }
  [[nodiscard]] CudaDevice::Stream stream() const { return stream_; }
  [[nodiscard]] uint64_t address() const { return address_; }
  [[nodiscard]] size_t bytes() const { return count_ * sizeof(float); }
  [[nodiscard]] std::vector<float> read() const {
    std::vector<float> values(count_);
    cuda().read(address_, values.data(), bytes(), stream_);
    return values;
  }

 private:
  CudaDevice& device_;
  size_t count_;
  uint64_t address_;
  CudaDevice::Stream stream_ = nullptr;
};

}  // namespace check
