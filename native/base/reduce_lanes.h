// The reduction loop, written once for every element type and register width.
//
// Each file that includes this is compiled for its own instruction set. Everything is therefore in an unnamed
// namespace, and nothing calls the standard library: the linker keeps one copy of an inline function with external
// linkage, and that copy could contain AVX-512.
#pragma once

#include "base/reduce_kernel.h"

namespace farandole {
namespace {

// A register of `kBytes` holding T, or one plain T when kBytes is its size. Operators and ?: work on both.
template <class T, int kBytes>
struct Register {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T, int kBytes>
  requires(sizeof(T) == kBytes)
struct Register<T, kBytes> {
  using type = T;
};
template <class T, int kBytes>
using RegisterOf = typename Register<T, kBytes>::type;

struct Add {
  template <class R>
  static R of(R a, R b) {
    return static_cast<R>(a + b);
  }
};

struct Multiply {
  template <class R>
  static R of(R a, R b) {
    if constexpr (__is_same(R, uint8_t) || __is_same(R, uint16_t)) {
      return static_cast<R>(1U * a * b);  // uint16_t operands promote to int, which could overflow
    } else {
      return a * b;
    }
  }
};

// `a != a` keeps a NaN on the left. A comparison with NaN is false, which keeps a NaN on the right.
struct Smaller {
  template <class R>
  static R of(R a, R b) {
    return a != a ? a : (a < b ? a : b);
  }
};

struct Larger {
  template <class R>
  static R of(R a, R b) {
    return a != a ? a : (a > b ? a : b);
  }
};

struct Or {
  template <class R>
  static R of(R a, R b) {
    return static_cast<R>(a | b);
  }
};

struct And {
  template <class R>
  static R of(R a, R b) {
    return static_cast<R>(a & b);
  }
};

template <class Combiner, class R>
R combined(R a, R b) {
  return Combiner::of(a, b);
}

// Two registers used as one, for elements that are widened as even and odd halves.
template <class R>
struct Twin {
  R even, odd;
};

template <class R, class Math>
Twin<R> operator*(Twin<R> lanes, Math factor) {
  return {lanes.even * factor, lanes.odd * factor};
}

template <class R, class Math>
Twin<R> operator/(Twin<R> lanes, Math divisor) {
  return {lanes.even / divisor, lanes.odd / divisor};
}

template <class Combiner, class R>
Twin<R> combined(Twin<R> a, Twin<R> b) {
  return {Combiner::of(a.even, b.even), Combiner::of(a.odd, b.odd)};
}

// Codec: `Stored` is the element in memory, `Math` the type of one lane, `Lanes` the register, `kWidth` its elements;
// `load` and `store` convert between kWidth elements at any address and a register.
template <class Codec, class Combiner, Scaling kScaling>
struct Loop {
  using Stored = typename Codec::Stored;
  using Math = typename Codec::Math;
  using Lanes = typename Codec::Lanes;
  static constexpr size_t kWidth = Codec::kWidth;
  // Independent chains that hide the latency of a conversion and an addition.
  static constexpr size_t kUnrolled = 4;
  static constexpr size_t kStep = kUnrolled * kWidth;

  struct Factors {
    Math prescale, postscale, divisor;
  };

  static Lanes first(Lanes value, const Factors& factors) {
    if constexpr (kScaling == Scaling::Full) {
      return value * factors.prescale;
    } else {
      return value;
    }
  }

  static Lanes last(Lanes value, const Factors& factors) {
    if constexpr (kScaling == Scaling::Factored) {
      return value * factors.postscale;
    } else if constexpr (kScaling == Scaling::Full) {
      value = value * factors.postscale;
      return factors.divisor == Math{1} ? value : value / factors.divisor;
    } else {
      return value;
    }
  }

  template <size_t kRegisters>
  static void store(const Lanes (&sums)[kRegisters], Stored* to, const Factors& factors) {
    for (size_t r = 0; r < kRegisters; ++r) {
      Codec::store(to + r * kWidth, last(sums[r], factors));
    }
  }

  // Reduces kRegisters registers from element `at` on. Reads every source before writing, because `dst` and `also` may
  // be sources.
  template <size_t kRegisters, bool kTwice>
  static void block(const ReduceJob& job, const Factors& factors, size_t at) {
    Lanes sums[kRegisters];
    const Stored* source = static_cast<const Stored*>(job.sources[0]) + at;
    for (size_t r = 0; r < kRegisters; ++r) {
      sums[r] = first(Codec::load(source + r * kWidth), factors);
    }
    for (size_t s = 1; s < job.source_count; ++s) {
      source = static_cast<const Stored*>(job.sources[s]) + at;
      for (size_t r = 0; r < kRegisters; ++r) {
        sums[r] = combined<Combiner>(sums[r], first(Codec::load(source + r * kWidth), factors));
      }
    }
    store(sums, static_cast<Stored*>(job.dst) + at, factors);
    if constexpr (kTwice) store(sums, static_cast<Stored*>(job.also) + at, factors);
  }

  // The case of two sources, without the loop over sources. Two ranks, and every hop of a ring, use it.
  template <size_t kRegisters, bool kTwice>
  static void pair(const Stored* a, const Stored* b, Stored* dst, Stored* also, const Factors& factors) {
    Lanes sums[kRegisters];
    for (size_t r = 0; r < kRegisters; ++r) {
      sums[r] =
          combined<Combiner>(first(Codec::load(a + r * kWidth), factors), first(Codec::load(b + r * kWidth), factors));
    }
    store(sums, dst, factors);
    if constexpr (kTwice) store(sums, also, factors);
  }

  // Reduces a part of a register, up to element `end`, through a padded one; the padding is never stored.
  static void part(const ReduceJob& job, const Factors& factors, size_t at, size_t end) {
    const size_t bytes = (end - at) * sizeof(Stored);
    Stored padded[kWidth] = {};
    __builtin_memcpy(padded, static_cast<const Stored*>(job.sources[0]) + at, bytes);
    Lanes sum = first(Codec::load(padded), factors);
    for (size_t s = 1; s < job.source_count; ++s) {
      __builtin_memcpy(padded, static_cast<const Stored*>(job.sources[s]) + at, bytes);
      sum = combined<Combiner>(sum, first(Codec::load(padded), factors));
    }
    Codec::store(padded, last(sum, factors));
    __builtin_memcpy(static_cast<Stored*>(job.dst) + at, padded, bytes);
    if (job.also != nullptr) __builtin_memcpy(static_cast<Stored*>(job.also) + at, padded, bytes);
  }

  // The number of elements before those whose stores to `dst` are aligned; 0 if aligning them is not worth its time.
  // A store across two cache lines costs twice, and more if other processors have read them.
  static size_t unaligned(const ReduceJob& job) {
    constexpr size_t kStored = kWidth * sizeof(Stored);
    const size_t past = reinterpret_cast<uintptr_t>(job.dst) % kStored;
    if (past == 0 || past % sizeof(Stored) != 0 || job.count < 16 * kStep) return 0;
    return (kStored - past) / sizeof(Stored);
  }

  template <bool kTwice>
  static void all(const ReduceJob& job) {
    const Factors factors{static_cast<Math>(job.prescale), static_cast<Math>(job.postscale),
                          static_cast<Math>(job.divisor)};
    size_t at = unaligned(job);
    if (at > 0) part(job, factors, 0, at);
    if (job.source_count == 2) {
      const Stored* a = static_cast<const Stored*>(job.sources[0]);
      const Stored* b = static_cast<const Stored*>(job.sources[1]);
      Stored* dst = static_cast<Stored*>(job.dst);
      Stored* also = static_cast<Stored*>(job.also);
      for (; at + kStep <= job.count; at += kStep) {
        pair<kUnrolled, kTwice>(a + at, b + at, dst + at, kTwice ? also + at : nullptr, factors);
      }
    } else {
      for (; at + kStep <= job.count; at += kStep) {
        block<kUnrolled, kTwice>(job, factors, at);
      }
    }
    for (; at + kWidth <= job.count; at += kWidth) {
      block<1, kTwice>(job, factors, at);
    }
    if (at < job.count) {
      part(job, factors, at, job.count);
    }
  }

  static void run(const ReduceJob& job) {
    if (job.also == nullptr) all<false>(job);
    else all<true>(job);
  }
};

// Codec for elements that are computed in their own type.
template <class T, int kBytes>
struct OwnType {
  using Stored = T;
  using Math = T;
  using Lanes = RegisterOf<T, kBytes>;
  static constexpr size_t kWidth = kBytes / sizeof(T);
  static Lanes load(const T* from) {
    Lanes lanes;
    __builtin_memcpy(&lanes, from, sizeof lanes);
    return lanes;
  }
  static void store(T* to, Lanes lanes) { __builtin_memcpy(to, &lanes, sizeof lanes); }
};

// Codec for bfloat16 in registers. A 32-bit lane holds a pair of elements. The odd element is the upper half: clearing
// the lower half makes it an fp32. The even element is shifted up. Nothing crosses lanes. Not x86's vcvtneps2bf16: it
// flushes subnormals to zero, so the result would depend on the processor.
template <int kBytes>
struct Bf16Pairs {
  using Stored = uint16_t;
  using Math = float;
  using Half = RegisterOf<float, kBytes>;
  using Bits = RegisterOf<uint32_t, kBytes>;
  using Lanes = Twin<Half>;
  static constexpr size_t kWidth = kBytes / sizeof(Stored);
  static Lanes load(const uint16_t* from) {
    Bits pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    return {reinterpret_cast<Half>(pairs << 16), reinterpret_cast<Half>(pairs & 0xFFFF0000U)};
  }
  static void store(uint16_t* to, Lanes lanes) {
    const Bits pairs = (rounded(lanes.even) >> 16) | (rounded(lanes.odd) & 0xFFFF0000U);
    __builtin_memcpy(to, &pairs, sizeof pairs);
  }

 private:
  // Rounds to nearest even in the upper half. A NaN has zeros in its lower half here, because it comes from bf16 values
  // and the factors that reduce() admits. So the addition cannot turn it into an infinity or a zero.
  static Bits rounded(Half value) {
    const Bits bits = reinterpret_cast<Bits>(value);
    return bits + (((bits >> 16) & 1U) + 0x7FFFU);
  }
};

// Copies in registers of kBytes. Stores to `Sink` are aligned, because a store across cache lines costs twice.
template <int kBytes, class Sink>
void copy_lanes(std::byte* to, const std::byte* from, size_t bytes) {
  using Codec = OwnType<uint8_t, kBytes>;
  constexpr size_t kStep = 4 * size_t{kBytes};
  if (bytes < 2 * kStep) {
    if (bytes > 0) __builtin_memcpy(to, from, bytes);
    return;
  }
  auto* target = reinterpret_cast<uint8_t*>(to);
  const auto* source = reinterpret_cast<const uint8_t*>(from);
  Codec::store(target, Codec::load(source));
  size_t at = kBytes - reinterpret_cast<uintptr_t>(target) % kBytes;
  for (; at + kStep <= bytes; at += kStep) {
    typename Codec::Lanes lanes[4];
    for (size_t r = 0; r < 4; ++r) {
      lanes[r] = Codec::load(source + at + r * kBytes);
    }
    for (size_t r = 0; r < 4; ++r) {
      Sink::store(target + at + r * kBytes, lanes[r]);
    }
  }
  __builtin_memcpy(target + at, source + at, bytes - at);
}

// Codec for bytes of any value, read as 0 or 1.
template <int kBytes>
struct Truth : OwnType<uint8_t, kBytes> {
  using Lanes = RegisterOf<uint8_t, kBytes>;
  static Lanes load(const uint8_t* from) {
    const Lanes lanes = OwnType<uint8_t, kBytes>::load(from);
    return lanes != 0 ? Lanes{} + uint8_t{1} : Lanes{};
  }
};

template <class Codec, class Combiner>
void fill_float_op(ReduceTable& table, DType dtype, Combine combine) {
  table.at(dtype, combine, Scaling::Plain) = &Loop<Codec, Combiner, Scaling::Plain>::run;
  table.at(dtype, combine, Scaling::Factored) = &Loop<Codec, Combiner, Scaling::Factored>::run;
  table.at(dtype, combine, Scaling::Full) = &Loop<Codec, Combiner, Scaling::Full>::run;
}

template <class Codec>
void fill_float(ReduceTable& table, DType dtype) {
  fill_float_op<Codec, Add>(table, dtype, Combine::Sum);
  fill_float_op<Codec, Smaller>(table, dtype, Combine::Min);
  fill_float_op<Codec, Larger>(table, dtype, Combine::Max);
  fill_float_op<Codec, Multiply>(table, dtype, Combine::Product);
}

// Sum and Product give the same bits for both signs. Only unsigned arithmetic may wrap.
template <class SignedCodec, class UnsignedCodec>
void fill_integers(ReduceTable& table, DType signed_dtype, DType unsigned_dtype) {
  const DType dtypes[] = {signed_dtype, unsigned_dtype};
  for (const DType dtype : dtypes) {
    table.at(dtype, Combine::Sum, Scaling::Plain) = &Loop<UnsignedCodec, Add, Scaling::Plain>::run;
    table.at(dtype, Combine::Product, Scaling::Plain) = &Loop<UnsignedCodec, Multiply, Scaling::Plain>::run;
  }
  table.at(signed_dtype, Combine::Min, Scaling::Plain) = &Loop<SignedCodec, Smaller, Scaling::Plain>::run;
  table.at(signed_dtype, Combine::Max, Scaling::Plain) = &Loop<SignedCodec, Larger, Scaling::Plain>::run;
  table.at(unsigned_dtype, Combine::Min, Scaling::Plain) = &Loop<UnsignedCodec, Smaller, Scaling::Plain>::run;
  table.at(unsigned_dtype, Combine::Max, Scaling::Plain) = &Loop<UnsignedCodec, Larger, Scaling::Plain>::run;
}

template <class Codec>
void fill_bool(ReduceTable& table) {
  table.at(DType::Bool, Combine::Sum, Scaling::Plain) = &Loop<Codec, Or, Scaling::Plain>::run;
  table.at(DType::Bool, Combine::Max, Scaling::Plain) = &Loop<Codec, Or, Scaling::Plain>::run;
  table.at(DType::Bool, Combine::Product, Scaling::Plain) = &Loop<Codec, And, Scaling::Plain>::run;
  table.at(DType::Bool, Combine::Min, Scaling::Plain) = &Loop<Codec, And, Scaling::Plain>::run;
}

// All kernels of one register width but those of float16.
template <int kBytes>
void fill_width(ReduceTable& table) {
  table.copy = &copy_lanes<kBytes, OwnType<uint8_t, kBytes>>;
  fill_float<Bf16Pairs<kBytes>>(table, DType::BFloat16);
  fill_float<OwnType<float, kBytes>>(table, DType::Float32);
  fill_float<OwnType<double, kBytes>>(table, DType::Float64);
  fill_integers<OwnType<int8_t, kBytes>, OwnType<uint8_t, kBytes>>(table, DType::Int8, DType::UInt8);
  fill_integers<OwnType<int16_t, kBytes>, OwnType<uint16_t, kBytes>>(table, DType::Int16, DType::UInt16);
  fill_integers<OwnType<int32_t, kBytes>, OwnType<uint32_t, kBytes>>(table, DType::Int32, DType::UInt32);
  fill_integers<OwnType<int64_t, kBytes>, OwnType<uint64_t, kBytes>>(table, DType::Int64, DType::UInt64);
  fill_bool<Truth<kBytes>>(table);
}

}  // namespace
}  // namespace farandole
