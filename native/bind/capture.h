#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "base/dtype.h"

namespace farandole {

/// The memory of a tensor of any framework, seen without copying. Valid while the tensor stays as it is.
struct Captured {
  std::byte* data = nullptr;
  DType dtype = DType::UInt8;
  std::span<const int64_t> shape;
  bool writable = true;
  nanobind::object owner;  // of the memory

  [[nodiscard]] size_t bytes() const;
};

/// Looks into `tensor`: DLPack's C exchange interface where its type has one (torch: 80 ns), else the buffer protocol
/// (numpy), else `__dlpack__`. `name` is for the error: Error (Invalid) when it is no dense, C-contiguous tensor in CPU
/// memory of a known type.
[[nodiscard]] Captured capture(nanobind::handle tensor, std::string_view name);

/// Keeps the memory of input and output (null: none) alive. May be dropped by any thread, with or without the GIL.
[[nodiscard]] std::shared_ptr<void> keep_alive(const Captured& input, const Captured* output);

/// Drops the references that other threads have given up; call with the GIL held.
void sweep_references();

}  // namespace farandole
