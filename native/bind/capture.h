#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "base/dtype.h"
#include "bind/dlpack.h"
#include "device/cuda_device.h"

namespace farandole {

/// A buffer of a Python object (buffer protocol), released by the destructor. Used under the GIL.
class LentBuffer {
 public:
  LentBuffer() = default;
  /// Throws the exporter's error, for example if it has no buffer of the kind that `flags` ask for.
  explicit LentBuffer(nanobind::handle exporter, int flags = PyBUF_FULL_RO);
  ~LentBuffer();
  LentBuffer(LentBuffer&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  LentBuffer& operator=(LentBuffer&& other) noexcept {
    std::swap(view_, other.view_);
    return *this;
  }

  [[nodiscard]] const Py_buffer& view() const { return view_; }
  /// Returns whether `shape` points into the view itself. The view must then not be moved.
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
  nanobind::object owner;                    // of the memory, unless `buffer` holds it
  LentBuffer buffer;                         // cheaper than an owner, for the duration of a call
  CudaDevice* device = nullptr;              // null: host memory; otherwise `data` is an address of the device
  CudaDevice::Stream stream = nullptr;       // of a tensor on a device: a use of the memory must wait for its work
  const dlpack::ExchangeApi* api = nullptr;  // of the tensor's type, if it returned `stream`

  [[nodiscard]] size_t bytes() const;
  [[nodiscard]] bool has_owner() const { return owner.is_valid() || buffer.view().obj != nullptr; }
  /// Returns the same memory without ownership. This object must outlive the copy.
  [[nodiscard]] Captured again() const;
};

/// Reads the memory of `tensor` by DLPack's C exchange interface if its type has one (torch: 80 ns), else by the buffer
/// protocol (numpy), else by `__dlpack__`. Throws Error (Invalid) with `name` unless it is a dense, C-contiguous tensor
/// of a known type in CPU memory or on a CUDA device, and Error (Fabric) if the device cannot be used.
[[nodiscard]] Captured capture(nanobind::handle tensor, std::string_view name);

/// Does as capture() for a tensor whose type is read by the buffer protocol. The memory neither moves nor changes its
/// shape while the result lives. Returns nothing for other types.
[[nodiscard]] std::optional<Captured> capture_lasting(nanobind::handle tensor, std::string_view name);

/// Returns the stream in which the calling thread works on `device`, according to `api`.
[[nodiscard]] CudaDevice::Stream current_stream(const dlpack::ExchangeApi& api, const CudaDevice& device);

/// Returns an object that keeps the memory of `input` and `output` (null: none) alive. Any thread may destroy it, with
/// or without the GIL. Throws Python's error if a second view of a buffer cannot be made.
[[nodiscard]] std::shared_ptr<void> keep_alive(const Captured& input, const Captured* output);

/// Drops the references that other threads have queued; needs the GIL.
void sweep_references();

}  // namespace farandole
