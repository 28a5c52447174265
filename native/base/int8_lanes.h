// The kernels of int8_blocks.h, written once for every register width; see reduce_lanes.h for the rules.
#pragma once

#include "base/reduce_lanes.h"

namespace farandole {
namespace {

template <int kBytes>
struct Int8Lanes {
  using Floats = RegisterOf<float, kBytes>;
  using Ints = RegisterOf<int32_t, kBytes>;
  using Bytes = RegisterOf<int8_t, kBytes / 4>;
  static constexpr size_t kWidth = kBytes / sizeof(float);

  template <class To, class From>
  static To converted(From lanes) {
    if constexpr (kWidth == 1) return static_cast<To>(lanes);
    else return __builtin_convertvector(lanes, To);
  }

  // Zeros fill a register at the end of a block.
  template <class Lanes, class T>
  static Lanes load(const T* from, size_t count) {
    Lanes lanes{};
    if (count >= kWidth) __builtin_memcpy(&lanes, from, sizeof lanes);
    else __builtin_memcpy(&lanes, from, count * sizeof(T));
    return lanes;
  }

  template <class Lanes, class T>
  static void store(T* to, size_t count, Lanes lanes) {
    if (count >= kWidth) __builtin_memcpy(to, &lanes, sizeof lanes);
    else __builtin_memcpy(to, &lanes, count * sizeof(T));
  }

  // The bits of the largest magnitude. Among integers a NaN is the largest, an infinity the next.
  static int32_t largest(const float* from, size_t count) {
    Ints most{};
    for (size_t at = 0; at < count; at += kWidth) {
      const Ints bits = __builtin_bit_cast(Ints, load<Floats>(from + at, count - at)) & 0x7FFFFFFF;
      most = bits > most ? bits : most;
    }
    int32_t each[kWidth];
    __builtin_memcpy(each, &most, sizeof most);
    for (const int32_t one : each) each[0] = one > each[0] ? one : each[0];
    return each[0];
  }

  static float quantise(const float* from, size_t count, std::byte* to) {
    constexpr int32_t kInfinity = 0x7F800000;
    constexpr int32_t kLeast = (127 - 100) << 23;  // 2^-100
    const int32_t bits = largest(from, count);
    if (bits < kLeast || bits >= kInfinity) {
      __builtin_memset(to, 0, count);
      return bits < kLeast ? 0.0F : __builtin_nanf("");
    }
    const float peak = __builtin_bit_cast(float, bits);
    const float inverse = 127.0F / peak;
    // The sum with 1.5 * 2^23 has no place for a fraction, so the adder rounds to nearest even. Its lowest byte is the
    // integer.
    constexpr float kRound = 12582912.0F;
    for (size_t at = 0; at < count; at += kWidth) {
      const Floats sum = load<Floats>(from + at, count - at) * inverse + kRound;
      store(reinterpret_cast<int8_t*>(to) + at, count - at, converted<Bytes>(__builtin_bit_cast(Ints, sum)));
    }
    return peak * 0x1.020404p-7F;  // a little below 1 / 127, so that 127 steps are no infinity
  }

  static void add_block(const std::byte* from, float scale, size_t count, float* to) {
    for (size_t at = 0; at < count; at += kWidth) {
      const Bytes bytes = load<Bytes>(reinterpret_cast<const int8_t*>(from) + at, count - at);
      const Floats values = converted<Floats>(converted<Ints>(bytes)) * scale;
      store(to + at, count - at, load<Floats>(to + at, count - at) + values);
    }
  }
};

template <int kBytes>
void fill_int8(ReduceTable& table) {
  table.quantise = &Int8Lanes<kBytes>::quantise;
  table.add_block = &Int8Lanes<kBytes>::add_block;
}

}  // namespace
}  // namespace farandole
