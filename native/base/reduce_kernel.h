// Kernels shared by reduce.cc and its files per instruction set. Private to them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace farandole {

struct ReduceJob {
  void* dst;
  void* also;  // a second place for the result, or nullptr
  const void* const* sources;
  size_t source_count;  // >= 1
  size_t count;
  double prescale;
  double postscale;  // Factored: the only factor, divisor included
  int divisor;
};

using ReduceKernel = void (*)(const ReduceJob& job);
using CopyKernel = void (*)(std::byte* to, const std::byte* from, size_t bytes);
// Writes the int8 values of a block, and returns its scale.
using QuantiseKernel = float (*)(const float* from, size_t count, std::byte* to);
// Adds an error to the values of a block, rounds them, and sets the error to what they lose: feed_error() of a block.
using FeedBlockKernel = void (*)(float* values, size_t count, float* error);
// Writes the values of a block with the given scale, or adds them to those at `to`.
using BlockKernel = void (*)(const std::byte* from, float scale, size_t count, float* to);

enum class Combine : uint8_t { Sum, Min, Max, Product };
inline constexpr int kCombines = 4;

enum class Scaling : uint8_t {
  Plain,
  Factored,  // floats: times postscale. Integers (Sum only): the exact average.
  Full,      // prescale, postscale and divisor
};
inline constexpr int kScalings = 3;

struct ReduceTable {
  const char* level = "";
  CopyKernel copy = nullptr;
  CopyKernel stream = nullptr;
  QuantiseKernel quantise = nullptr;
  FeedBlockKernel feed_block = nullptr;
  BlockKernel read_block = nullptr;
  BlockKernel add_block = nullptr;
  ReduceKernel kernels[kDTypes][kCombines][kScalings] = {};  // nullptr: no such reduction

  // Out of line, because inline functions are unsafe here: see reduce_lanes.h.
  [[nodiscard]] ReduceKernel& at(DType dtype, Combine combine, Scaling scaling);
};

// The table of the SIMD level in use.
[[nodiscard]] const ReduceTable& active_table();

// Each overwrites the entries for which it has a faster kernel; call the scalar one first.
void fill_scalar(ReduceTable& table);
void fill_avx2(ReduceTable& table);    // x86-64 only; the processor must have AVX2 and F16C
void fill_avx512(ReduceTable& table);  // x86-64 only; the processor must have AVX-512 F, BW, DQ, VL
void fill_neon(ReduceTable& table);    // aarch64 only, where every processor has NEON

}  // namespace farandole
