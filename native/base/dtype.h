// Element types that cross ranks; the values are part of the wire format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

enum class DType : uint8_t {
  UInt8 = 0,
  Int8 = 1,
  Int32 = 2,
  Int64 = 3,
  Float16 = 4,
  BFloat16 = 5,
  Float32 = 6,
  Float64 = 7,
  Bool = 8,
  Int16 = 9,
  UInt16 = 10,
  UInt32 = 11,
  UInt64 = 12,
};

inline constexpr int kDTypes = 13;

// Returns whether `value` is a DType. Check every byte that a peer sends before using it as one.
[[nodiscard]] constexpr bool is_dtype(uint8_t value) { return value < kDTypes; }

// Bytes per element; 0 for a value that is not a DType.
[[nodiscard]] constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::UInt8:
    case DType::Int8:
    case DType::Bool: return 1;
    case DType::Float16:
    case DType::BFloat16:
    case DType::Int16:
    case DType::UInt16: return 2;
    case DType::Int32:
    case DType::Float32:
    case DType::UInt32: return 4;
    case DType::Int64:
    case DType::Float64:
    case DType::UInt64: return 8;
  }
  return 0;
}

// Returns whether factors are applied in floating point, without truncation.
[[nodiscard]] constexpr bool is_floating(DType dtype) {
  return dtype == DType::Float16 || dtype == DType::BFloat16 || dtype == DType::Float32 || dtype == DType::Float64;
}

// Returns whether the type has any reduction; check_reduction() in reduce.h checks a particular one.
[[nodiscard]] constexpr bool reducible(DType dtype) { return size_of(dtype) != 0; }

// The name that users know: "float32", "bfloat16", "bool".
[[nodiscard]] const char* name_of(DType dtype);

}  // namespace farandole
