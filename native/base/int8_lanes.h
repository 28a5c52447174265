// The kernels of int8_blocks.h, written once for every instruction set; see reduce_lanes.h for the rules.
//
// They are plain loops of a fixed length, because compilers make better code of these than of registers with a check
// for the end of the block: by AVX-512 the loops take a fifth of the time.
#pragma once

#include "base/int8_blocks.h"
#include "base/reduce_kernel.h"

namespace farandole {
namespace {

struct Int8Kernels {
  static constexpr int32_t kInfinity = 0x7F800000;
  static constexpr int32_t kLeast = (127 - 100) << 23;   // 2^-100
  static constexpr float kScaleOfPeak = 0x1.020404p-7F;  // a little below 1 / 127, so that 127 steps are no infinity
  static constexpr size_t kBytes = kInt8Block * sizeof(float);

  // The bits of the largest magnitude. Among integers a NaN is the largest, an infinity the next.
  static int32_t largest(const float* from) {
    int32_t most = 0;
    for (size_t i = 0; i < kInt8Block; ++i) {
      const int32_t bits = __builtin_bit_cast(int32_t, from[i]) & 0x7FFFFFFF;
      most = bits > most ? bits : most;
    }
    return most;
  }

  // The sum with 1.5 * 2^23 has no place for a fraction, so the adder rounds to nearest even. Its lowest byte is the
  // integer.
  static int8_t rounded(float value, float inverse) {
    return static_cast<int8_t>(__builtin_bit_cast(int32_t, value* inverse + 12582912.0F));
  }

  static float quantise_block(const float* __restrict from, int8_t* __restrict to) {
    const int32_t bits = largest(from);
    if (bits < kLeast || bits >= kInfinity) {
      __builtin_memset(to, 0, kInt8Block);
      return bits < kLeast ? 0.0F : __builtin_nanf("");
    }
    const float peak = __builtin_bit_cast(float, bits);
    const float inverse = 127.0F / peak;
    for (size_t i = 0; i < kInt8Block; ++i) to[i] = rounded(from[i], inverse);
    return peak * kScaleOfPeak;
  }

  static void feed_block(float* __restrict values, float* __restrict error) {
    for (size_t i = 0; i < kInt8Block; ++i) values[i] += error[i];
    const int32_t bits = largest(values);
    if (bits >= kInfinity) {
      __builtin_memset(error, 0, kBytes);
      return;
    }
    const float peak = __builtin_bit_cast(float, bits);
    const float inverse = bits < kLeast ? 0.0F : 127.0F / peak;
    const float scale = bits < kLeast ? 0.0F : peak * kScaleOfPeak;
    for (size_t i = 0; i < kInt8Block; ++i) {
      const float whole = values[i];
      values[i] = static_cast<float>(rounded(whole, inverse)) * scale;
      error[i] = whole - values[i];
    }
  }

  // A tensor's last block, which may be shorter, is padded with zeros.

  static float quantise(const float* from, size_t count, std::byte* to) {
    if (count == kInt8Block) return quantise_block(from, reinterpret_cast<int8_t*>(to));
    float values[kInt8Block] = {};
    int8_t kept[kInt8Block];
    __builtin_memcpy(values, from, count * sizeof(float));
    const float scale = quantise_block(values, kept);
    __builtin_memcpy(to, kept, count);
    return scale;
  }

  static void feed(float* values, size_t count, float* error) {
    if (count == kInt8Block) {
      feed_block(values, error);
      return;
    }
    float padded[kInt8Block] = {}, lost[kInt8Block] = {};
    __builtin_memcpy(padded, values, count * sizeof(float));
    __builtin_memcpy(lost, error, count * sizeof(float));
    feed_block(padded, lost);
    __builtin_memcpy(values, padded, count * sizeof(float));
    __builtin_memcpy(error, lost, count * sizeof(float));
  }

  static void read(const std::byte* from, float scale, size_t count, float* __restrict to) {
    const int8_t* __restrict kept = reinterpret_cast<const int8_t*>(from);
    for (size_t i = 0; i < count; ++i) to[i] = static_cast<float>(kept[i]) * scale;
  }

  static void add(const std::byte* from, float scale, size_t count, float* __restrict to) {
    const int8_t* __restrict kept = reinterpret_cast<const int8_t*>(from);
    for (size_t i = 0; i < count; ++i) to[i] += static_cast<float>(kept[i]) * scale;
  }
};

void fill_int8(ReduceTable& table) {
  table.quantise = &Int8Kernels::quantise;
  table.feed_block = &Int8Kernels::feed;
  table.read_block = &Int8Kernels::read;
  table.add_block = &Int8Kernels::add;
}

}  // namespace
}  // namespace farandole
