#pragma once

#include <cstddef>
#include <utility>

#include "device/cuda_device.h"

namespace farandole {

/// Device memory that is allocated and freed in the order of a stream, so that no thread waits; move-only.
///
/// The owner frees it by end_in() or end_after(). The destructor leaves it allocated, because work on the device may
/// still use it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// Allocates `bytes` for later work in `stream`, uninitialized. Throws Error (Fabric).
  DeviceMemory(CudaDevice& device, size_t bytes, CudaDevice::Stream stream)
      : device_(&device), address_(device.allocate(bytes, stream)) {}
  DeviceMemory(DeviceMemory&& other) noexcept : device_(other.device_), address_(std::exchange(other.address_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    return *this;
  }

  [[nodiscard]] CudaDevice::Address address() const { return address_; }
  [[nodiscard]] std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }  // the host cannot access it

  /// Frees the memory after the work that is in `stream` now.
  void end_in(CudaDevice::Stream stream) noexcept {
    if (address_ != 0) device_->free(std::exchange(address_, 0), stream);
  }
  /// Frees the memory after the work before `last`.
  void end_after(const CudaMark& last) noexcept {
    if (address_ != 0) device_->free_after(std::exchange(address_, 0), last);
  }

 private:
  CudaDevice* device_ = nullptr;
  CudaDevice::Address address_ = 0;
};

}  // namespace farandole
