#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "base/dtype.h"
#include "bind/dlpack.h"
#include "device/cuda_device.h"

namespace farandole {

/// A buffer that an object of Python's lends until this object ends. Used under the GIL.
class LentBuffer {
 public:
  LentBuffer() = default;
  /// Throws the exporter's error.
  explicit LentBuffer(nanobind::handle exporter);
  ~LentBuffer();
  LentBuffer(LentBuffer&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  LentBuffer& operator=(LentBuffer&& other) noexcept {
    std::swap(view_, other.view_);
    return *this;
  }

  [[nodiscard]] const Py_buffer& view() const { return view_; }
  /// Returns whether the extents stand in the view itself, which must not be moved then.
  [[nodiscard]] bool holds_shape() const { return view_.shape == &view_.len; }

 private:
  Py_buffer view_{};
};

/// The memory of a tensor of any framework, without a copy. Valid while the tensor stays unchanged.
struct Captured {
  std::byte* data = nullptr;
  DType dtype = DType::UInt8;
  std::span<const int64_t> shape;
  bool writable = true;
  nanobind::object owner;                    // of the memory, unless a buffer is lent
  LentBuffer buffer;                         // cheaper than an owner for the time of a call
  CudaDevice* device = nullptr;              // null: host memory; otherwise `data` is an address of the device
  CudaDevice::Stream stream = nullptr;       // of a tensor on a device: the work in it comes before a use of the memory
  const dlpack::ExchangeApi* api = nullptr;  // the source of `stream`, if it knows the current stream

  [[nodiscard]] size_t bytes() const;
  [[nodiscard]] bool has_owner() const { return owner.is_valid() || buffer.view().obj != nullptr; }
  /// Returns the same memory, which this object goes on to own.
  [[nodiscard]] Captured again() const;
};

/// Reads the memory of `tensor` by DLPack's C exchange interface if its type has one (torch: 80 ns), else by the buffer
/// protocol (numpy), else by `__dlpack__`. Throws Error (Invalid) with `name` unless it is a dense, C-contiguous tensor
/// of a known type in CPU memory or on a CUDA device, and Error (Fabric) if the device cannot be used.
[[nodiscard]] Captured capture(nanobind::handle tensor, std::string_view name);

/// Returns the stream in which the calling thread works on `device`, according to `api`.
[[nodiscard]] CudaDevice::Stream current_stream(const dlpack::ExchangeApi& api, const CudaDevice& device);

/// Keeps the memory of input and output (null: none) alive. Any thread may drop it, with or without the GIL. Throws
/// Python's error if a lent buffer cannot be lent again.
[[nodiscard]] std::shared_ptr<void> keep_alive(const Captured& input, const Captured* output);

/// Drops the references that other threads have queued; needs the GIL.
void sweep_references();

}  // namespace farandole
