#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace farandole {

/// The memory of a tensor of any framework, seen without copying.
struct Captured {
  std::byte* data = nullptr;
  DType dtype = DType::UInt8;
  std::vector<int64_t> shape;
  bool writable = true;
  /// Owns the tensor. May be dropped by any thread, with or without the GIL.
  std::shared_ptr<void> owner;
};

/// Looks into `tensor`: DLPack's C exchange interface where its type has one (torch: 80 ns), else the buffer protocol
/// (numpy), else `__dlpack__`. `name` is for the error: Error (Invalid) when it is no dense, C-contiguous tensor in CPU
/// memory of a known type.
[[nodiscard]] Captured capture(nanobind::handle tensor, const std::string& name);

/// Drops the references that other threads have given up; call with the GIL held.
void sweep_references();

}  // namespace farandole
