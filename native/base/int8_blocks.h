// float32 values as blocks of 8-bit integers with a scale, which take 3.94 times fewer bytes in messages.
#pragma once

#include <cstddef>
#include <span>

#include "base/reduce.h"

namespace farandole {

// The operators of an allreduce that sends float32 as such blocks (collectives/int8.h), numbered after ReduceOp's own.
// They are not among these, because no element-wise reduction knows them.
inline constexpr ReduceOp kAverageInt8{6};
inline constexpr ReduceOp kSumInt8{7};
inline constexpr int kReduceOps = 8;

[[nodiscard]] constexpr bool is_int8(ReduceOp op) { return op == kAverageInt8 || op == kSumInt8; }
[[nodiscard]] constexpr bool averages(ReduceOp op) { return op == ReduceOp::Average || op == kAverageInt8; }
// Returns whether reduce() combines elements by `op`; the others need algorithms of their own.
[[nodiscard]] constexpr bool is_elementwise(ReduceOp op) { return op != ReduceOp::Adasum && !is_int8(op); }

// A block stands for up to `kInt8Block` values. It holds a float32 scale s and an int8 q for each value, which is then
// q * s. s is the largest magnitude of the block over 127, so a value is off by at most s / 2, half a step. A block of
// values below 2^-100 is a block of zeros. A block with a NaN or an infinity has the scale NaN: all its values become
// NaN, on every rank, so that a loss scaler or the loss shows it.
//
// The bits do not depend on the SIMD level. No pointer to blocks needs to be aligned.
inline constexpr size_t kInt8Block = 256;

[[nodiscard]] constexpr size_t int8_blocks(size_t count) { return (count + kInt8Block - 1) / kInt8Block; }
[[nodiscard]] constexpr size_t int8_bytes(size_t count) { return int8_blocks(count) * sizeof(float) + count; }

// Writes the blocks of `values`, int8_bytes(values.size()) bytes.
void quantise(std::span<const float> values, std::byte* to);
// Sets `values` to those of the blocks at `from`.
void dequantise(const std::byte* from, std::span<float> values);
// Sets the blocks of `count` values at `to` to factor * (the sum of those at each of `sources`), added in float32 in
// their order. `to` may be one of the sources.
void sum_runs(std::span<const std::byte* const> sources, size_t count, float factor, std::byte* to);

// Error feedback: adds `error` to `values`, rounds them to what quantise() keeps of them, and sets `error` to what they
// lose. quantise() then keeps them but for an ulp of the scale. A block that is not finite is not rounded and has no
// error.
void feed_error(std::span<float> values, float* error);

}  // namespace farandole
