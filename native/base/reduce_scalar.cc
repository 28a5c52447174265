// Portable kernels, including the integer averages and scalings that no SIMD level specializes.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/half.h"
#include "base/int8_lanes.h"
#include "base/reduce_lanes.h"

namespace farandole {
namespace {

struct Fp16 {
  using Stored = uint16_t;
  using Math = float;
  using Lanes = float;
  static constexpr size_t kWidth = 1;
  static float load(const uint16_t* from) { return fp16_to_fp32(OwnType<uint16_t, 2>::load(from)); }
  static void store(uint16_t* to, float value) { OwnType<uint16_t, 2>::store(to, fp32_to_fp16(value)); }
};

struct Bf16 {
  using Stored = uint16_t;
  using Math = float;
  using Lanes = float;
  static constexpr size_t kWidth = 1;
  static float load(const uint16_t* from) { return bf16_to_fp32(OwnType<uint16_t, 2>::load(from)); }
  static void store(uint16_t* to, float value) { OwnType<uint16_t, 2>::store(to, fp32_to_bf16(value)); }
};

template <class T>
T load_at(const void* base, size_t at) {
  return OwnType<T, sizeof(T)>::load(static_cast<const T*>(base) + at);
}

template <class T>
void store_at(const ReduceJob& job, size_t at, T value) {
  OwnType<T, sizeof(T)>::store(static_cast<T*>(job.dst) + at, value);
  if (job.also != nullptr) OwnType<T, sizeof(T)>::store(static_cast<T*>(job.also) + at, value);
}

void copy_plainly(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

// Clamps values that do not fit; C leaves that conversion undefined.
template <class T>
T truncated(double value) {
  using Limits = std::numeric_limits<T>;
  if (std::isnan(value)) {
    return 0;
  }
  // For 64 bits double(max) is max + 1, so the comparison must include it.
  if (value >= static_cast<double>(Limits::max())) {
    return Limits::max();
  }
  return value <= static_cast<double>(Limits::min()) ? Limits::min() : static_cast<T>(value);
}

// An integer that holds the sum of 2^31 values of T.
template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, __int128, int64_t>;

template <class T>
Wide<T> divided(Wide<T> sum, int divisor) {
  if constexpr (sizeof(T) == 8) {
    // A 128-bit division is a library call, and nearly every sum fits 64 bits.
    if (sum == static_cast<int64_t>(sum)) {
      return static_cast<int64_t>(sum) / divisor;
    }
  }
  return sum / divisor;
}

template <class T>
void average(const ReduceJob& job) {
  for (size_t i = 0; i < job.count; ++i) {
    Wide<T> sum = 0;
    for (size_t s = 0; s < job.source_count; ++s) {
      sum += load_at<T>(job.sources[s], i);
    }
    // With as many sources as the divisor the mean fits T; otherwise it wraps like a Sum.
    store_at(job, i, static_cast<T>(divided<T>(sum, job.divisor)));
  }
}

template <class T>
T prescaled(const ReduceJob& job, size_t source, size_t at) {
  const T value = load_at<T>(job.sources[source], at);
  return job.prescale == 1 ? value : truncated<T>(static_cast<double>(value) * job.prescale);
}

// Applies factors around Min, Max, Product, and a Sum without divisor.
template <class T, class Combiner>
void scaled(const ReduceJob& job) {
  using Unsigned = std::make_unsigned_t<T>;
  constexpr bool kWraps = std::is_same_v<Combiner, Add> || std::is_same_v<Combiner, Multiply>;
  using Math = std::conditional_t<kWraps, Unsigned, T>;
  for (size_t i = 0; i < job.count; ++i) {
    Math result = static_cast<Math>(prescaled<T>(job, 0, i));
    for (size_t s = 1; s < job.source_count; ++s) {
      result = Combiner::of(result, static_cast<Math>(prescaled<T>(job, s, i)));
    }
    const T value = static_cast<T>(result);
    // A factor of 1 must not convert 64-bit values to double.
    store_at(job, i, job.postscale == 1 ? value : truncated<T>(static_cast<double>(value) * job.postscale));
  }
}

template <class T>
void scaled_sum(const ReduceJob& job) {
  if (job.divisor == 1) {
    scaled<T, Add>(job);
    return;
  }
  for (size_t i = 0; i < job.count; ++i) {
    Wide<T> sum = 0;
    for (size_t s = 0; s < job.source_count; ++s) {
      sum += prescaled<T>(job, s, i);
    }
    store_at(job, i,
             job.postscale == 1 ? static_cast<T>(divided<T>(sum, job.divisor))
                                : truncated<T>(static_cast<double>(sum) * job.postscale / job.divisor));
  }
}

template <class T>
void fill_integer_scaling(ReduceTable& table, DType dtype) {
  table.at(dtype, Combine::Sum, Scaling::Factored) = &average<T>;
  table.at(dtype, Combine::Sum, Scaling::Full) = &scaled_sum<T>;
  table.at(dtype, Combine::Min, Scaling::Full) = &scaled<T, Smaller>;
  table.at(dtype, Combine::Max, Scaling::Full) = &scaled<T, Larger>;
  table.at(dtype, Combine::Product, Scaling::Full) = &scaled<T, Multiply>;
}

template <class Signed, class Unsigned>
void fill_pair(ReduceTable& table, DType signed_dtype, DType unsigned_dtype) {
  using SignedCodec = OwnType<Signed, sizeof(Signed)>;
  using UnsignedCodec = OwnType<Unsigned, sizeof(Unsigned)>;
  fill_integers<SignedCodec, UnsignedCodec>(table, signed_dtype, unsigned_dtype);
  fill_integer_scaling<Signed>(table, signed_dtype);
  fill_integer_scaling<Unsigned>(table, unsigned_dtype);
}

}  // namespace

void fill_scalar(ReduceTable& table) {
  table.copy = &copy_plainly;
  table.stream = &copy_plainly;
  fill_float<Fp16>(table, DType::Float16);
  fill_float<Bf16>(table, DType::BFloat16);
  fill_float<OwnType<float, sizeof(float)>>(table, DType::Float32);
  fill_float<OwnType<double, sizeof(double)>>(table, DType::Float64);
  fill_pair<int8_t, uint8_t>(table, DType::Int8, DType::UInt8);
  fill_pair<int16_t, uint16_t>(table, DType::Int16, DType::UInt16);
  fill_pair<int32_t, uint32_t>(table, DType::Int32, DType::UInt32);
  fill_pair<int64_t, uint64_t>(table, DType::Int64, DType::UInt64);
  fill_bool<Truth<1>>(table);
  fill_int8(table);
}

}  // namespace farandole
