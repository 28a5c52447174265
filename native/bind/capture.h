#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "base/dtype.h"

namespace farandole {

/// The memory of a tensor of any framework, without a copy. Valid while the tensor stays unchanged.
struct Captured {
  std::byte* data = nullptr;
  DType dtype = DType::UInt8;
  std::span<const int64_t> shape;
  bool writable = true;
  nanobind::object owner;  // of the memory

  [[nodiscard]] size_t bytes() const;
};

/// Reads the memory of `tensor` by DLPack's C exchange interface if its type has one (torch: 80 ns), else by the buffer
/// protocol (numpy), else by `__dlpack__`. Throws Error (Invalid) with `name` unless it is a dense, C-contiguous tensor
/// in CPU memory of a known type.
[[nodiscard]] Captured capture(nanobind::handle tensor, std::string_view name);

/// Keeps the memory of input and output (null: none) alive. Any thread may drop it, with or without the GIL.
[[nodiscard]] std::shared_ptr<void> keep_alive(const Captured& input, const Captured* output);

/// Drops the references that other threads have queued; needs the GIL.
void sweep_references();

}  // namespace farandole
