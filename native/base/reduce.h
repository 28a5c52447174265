// Element-wise reductions over buffers of several ranks, vectorized for the processor found at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"

namespace farandole {

// Horovod's numbers; part of the wire format.
enum class ReduceOp : uint8_t { Average = 0, Sum = 1, Adasum = 2, Min = 3, Max = 4, Product = 5 };

[[nodiscard]] const char* name_of(ReduceOp op);

struct Reduction {
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  double postscale = 1;
  int divisor = 1;  // for Average: the number of ranks
};

// Throws Error::invalid, with an empty name, for a reduction that reduce() does not support: Adasum, averaged or scaled
// bools, a divisor below 1.
void check_reduction(DType dtype, const Reduction& reduction);

// Sets dst[i], and also[i] unless that is null, to postscale * f(prescale * sources[0][i], prescale * sources[1][i],
// ...) / divisor, in one pass.
//
// `dst` and `also` may each be one of the sources. They may not overlap a source otherwise, nor each other. No pointer
// needs to be aligned. Values are combined in the order of the sources, so equal inputs give equal bits on every rank
// and at every SIMD level, except for the payload of a NaN.
//   float32, float64: computed in their own type, factors too.
//   float16, bfloat16: computed in float32 over all sources and rounded once, to nearest even.
//   integers: Sum and Product wrap; Average adds exactly and truncates toward zero. Factors are applied in double: each
//     prescaled value and the postscaled result are truncated toward zero and clamped to the range (NaN becomes 0).
//   bool: every byte but 0 is true; Sum and Max are or, Product and Min are and; results are 0 or 1.
// Min and Max give NaN where any source is NaN, like numpy.minimum and numpy.maximum. A divisor that is a power of two
// is folded into postscale, which changes no bit short of overflow and underflow.
void reduce(DType dtype, const Reduction& reduction, void* dst, std::span<const void* const> sources, size_t count,
            void* also = nullptr);

// Multiplies in place by `factor`, with the rules for postscale in reduce().
void scale(DType dtype, double factor, void* data, size_t count);

// Copies like memcpy, in the widest registers. Use it for bytes that another core wrote last or reads next. For those
// memcpy, which uses `rep movsb` from a few KiB on, measured up to 1.4 times slower (shared slots, Zen 4, glibc 2.36).
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes);

// Copies with non-temporal stores: lines are not fetched before the write, nor taken from cores that have read them.
void stream_bytes(std::byte* to, const std::byte* from, size_t bytes);

// The SIMD level in use: "scalar", "avx2", "avx512" or "neon". Defaults to the widest that the processor supports.
[[nodiscard]] const char* simd_level();
// The levels that the processor supports, narrowest first.
[[nodiscard]] std::vector<const char*> simd_levels();
// Sets the level of the process, for tests and benchmarks. Throws Error::invalid for a level not in simd_levels().
void force_simd_level(const char* level);

}  // namespace farandole
