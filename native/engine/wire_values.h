// Encoding of the numbers and texts of control messages.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/wire.h"

namespace farandole {

/// Integers as little-endian base-128 groups (LEB128); signed ones zigzag; floats as their eight bytes.
class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out), start_(out.size()) { out_.resize(start_ + kFrameHeader); }

  void close() {
    const auto length = static_cast<uint32_t>(out_.size() - start_ - kFrameHeader);
    for (size_t i = 0; i < kFrameHeader; ++i) out_[start_ + i] = static_cast<std::byte>(length >> (8 * i));
  }
  void byte(uint8_t value) { out_.push_back(static_cast<std::byte>(value)); }
  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) byte(static_cast<uint8_t>(value | 0x80));
    byte(static_cast<uint8_t>(value));
  }
  void integer(int64_t value) { number(static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63)); }
  void real(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int i = 0; i < 8; ++i) byte(static_cast<uint8_t>(bits >> (8 * i)));
  }
  void bytes(std::span<const std::byte> value) {
    number(value.size());
    out_.insert(out_.end(), value.begin(), value.end());
  }
  void text(const std::string& value) { bytes(std::as_bytes(std::span(value))); }
  void integers(const std::vector<int64_t>& values) {
    number(values.size());
    for (const int64_t value : values) integer(value);
  }

 private:
  Bytes& out_;
  size_t start_;
};

/// Reads the output of Writer; throws Error (Internal) for anything else.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> body) : left_(body) {}

  [[nodiscard]] bool at_end() const { return left_.empty(); }
  uint8_t byte() {
    if (left_.empty()) fail();
    const auto value = static_cast<uint8_t>(left_[0]);
    left_ = left_.subspan(1);
    return value;
  }
  uint8_t below(uint8_t limit) {
    const uint8_t value = byte();
    if (value >= limit) fail();
    return value;
  }
  uint64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t next = byte();
      value |= static_cast<uint64_t>(next & 0x7f) << shift;
      if (next < 0x80) return value;
    }
    fail();
  }
  uint32_t small_number() {
    const uint64_t value = number();
    if (value > 0xffffffff) fail();
    return static_cast<uint32_t>(value);
  }
  /// A count of items of at least one byte each.
  size_t count() {
    const uint64_t value = number();
    if (value > left_.size()) fail();
    return value;
  }
  int64_t integer() {
    const uint64_t value = number();
    return static_cast<int64_t>(value >> 1 ^ (~(value & 1) + 1));
  }
  int32_t small_integer() {
    const int64_t value = integer();
    if (value != static_cast<int32_t>(value)) fail();
    return static_cast<int32_t>(value);
  }
  int32_t rank() {
    const int32_t value = small_integer();
    if (value < 0) fail();
    return value;
  }
  int64_t size() {
    const int64_t value = integer();
    if (value < 0) fail();
    return value;
  }
  double real() {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits |= static_cast<uint64_t>(byte()) << (8 * i);
    return std::bit_cast<double>(bits);
  }
  Bytes bytes() {
    const std::span<const std::byte> value = taken();
    return {value.begin(), value.end()};
  }
  std::string text() {
    const std::span<const std::byte> value = taken();
    return {reinterpret_cast<const char*>(value.data()), value.size()};
  }
  std::vector<int64_t> sizes() {
    std::vector<int64_t> values(count());
    for (int64_t& value : values) value = size();
    return values;
  }
  std::span<const std::byte> taken() {
    const std::span<const std::byte> value = left_.first(count());
    left_ = left_.subspan(value.size());
    return value;
  }
  [[noreturn]] static void fail() { throw Error::internal("a control message is damaged"); }

 private:
  std::span<const std::byte> left_;
};

}  // namespace farandole
