// Small whole numbers in every element type: sums and products of them are exact, so one reference serves all orders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "base/half.h"
#include "base/reduce.h"

namespace check {

class Elements {
 public:
  explicit Elements(farandole::DType dtype) : dtype_(dtype) {}

  /// Returns the elements [first, first + count) of `rank`.
  [[nodiscard]] std::vector<std::byte> fill(int rank, size_t first, size_t count) const {
    std::vector<std::byte> data(count * farandole::size_of(dtype_));
    for (size_t i = 0; i < count; ++i) store(data, i, value(rank, first + i));
    return data;
  }

  /// Returns the expected result of those elements.
  [[nodiscard]] std::vector<std::byte> reduced(int ranks, size_t first, size_t count,
                                               const farandole::Reduction& reduction) const {
    using farandole::ReduceOp;
    std::vector<std::byte> data(count * farandole::size_of(dtype_));
    for (size_t i = 0; i < count; ++i) {
      double total = value(0, first + i) * reduction.prescale;
      for (int rank = 1; rank < ranks; ++rank) {
        const double next = value(rank, first + i) * reduction.prescale;
        switch (reduction.op) {
          case ReduceOp::Min: total = next < total ? next : total; break;
          case ReduceOp::Max: total = next > total ? next : total; break;
          case ReduceOp::Product: total *= next; break;
          default: total += next;
        }
      }
      if (reduction.op == ReduceOp::Average) total /= reduction.divisor;
      store(data, i, total * reduction.postscale);
    }
    return data;
  }

 private:
  [[nodiscard]] bool is_signed() const {
    using farandole::DType;
    return dtype_ != DType::UInt8 && dtype_ != DType::UInt16 && dtype_ != DType::UInt32 && dtype_ != DType::UInt64 &&
           dtype_ != DType::Bool;
  }

  [[nodiscard]] double value(int rank, size_t index) const {
    const size_t mixed = (index * 2654435761U + static_cast<size_t>(rank) * 40503U) >> 7;
    if (dtype_ == farandole::DType::Bool) return mixed % 5 == 0 ? 0 : 1;
    return static_cast<double>(mixed % 5) - (is_signed() ? 2 : 0);
  }

  template <class T>
  static void put(std::vector<std::byte>& data, size_t index, T element) {
    std::memcpy(data.data() + index * sizeof element, &element, sizeof element);
  }

  void store(std::vector<std::byte>& data, size_t index, double number) const {
    using farandole::DType;
    // Through a wide integer: a product of eight small numbers may wrap in the narrow types.
    const auto whole = static_cast<int64_t>(number);
    switch (dtype_) {
      case DType::UInt8: return put(data, index, static_cast<uint8_t>(whole));
      case DType::Int8: return put(data, index, static_cast<int8_t>(whole));
      case DType::Int16: return put(data, index, static_cast<int16_t>(whole));
      case DType::UInt16: return put(data, index, static_cast<uint16_t>(whole));
      case DType::Int32: return put(data, index, static_cast<int32_t>(whole));
      case DType::UInt32: return put(data, index, static_cast<uint32_t>(whole));
      case DType::Int64: return put(data, index, whole);
      case DType::UInt64: return put(data, index, static_cast<uint64_t>(whole));
      case DType::Bool: return put(data, index, static_cast<uint8_t>(number != 0 ? 1 : 0));
      case DType::Float16: return put(data, index, farandole::fp32_to_fp16(static_cast<float>(number)));
      case DType::BFloat16: return put(data, index, farandole::fp32_to_bf16(static_cast<float>(number)));
      case DType::Float32: return put(data, index, static_cast<float>(number));
      case DType::Float64: return put(data, index, number);
    }
  }

  farandole::DType dtype_;
};

}  // namespace check
