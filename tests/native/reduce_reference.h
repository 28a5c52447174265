// Expected results of reductions, element by element in wider types, and random elements to reduce.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "base/half.h"
#include "base/reduce.h"

namespace reference {

using farandole::ReduceOp;
using farandole::Reduction;

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};
struct Truth {
  uint8_t byte;
};

template <class T>
concept Half = std::is_same_v<T, Fp16> || std::is_same_v<T, Bf16>;

// Floats: each step in double, rounded to `Step`. For float that equals float arithmetic, since 53 >= 2 * 24 + 2.
template <class Step>
double step(double value) {
  return static_cast<Step>(value);
}

inline double combined(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::Min: return std::isnan(a) ? a : (a < b ? a : b);
    case ReduceOp::Max: return std::isnan(a) ? a : (a > b ? a : b);
    case ReduceOp::Product: return a * b;
    default: return a + b;
  }
}

template <class Step>
double float_reference(const Reduction& reduction, const std::vector<double>& values) {
  const double pre = step<Step>(reduction.prescale);
  double result = step<Step>(values[0] * pre);
  for (size_t s = 1; s < values.size(); ++s) {
    result = step<Step>(combined(reduction.op, result, step<Step>(values[s] * pre)));
  }
  const int divisor = reduction.op == ReduceOp::Average ? reduction.divisor : 1;
  if ((divisor & (divisor - 1)) == 0) {
    return step<Step>(result * step<Step>(reduction.postscale / divisor));
  }
  return step<Step>(step<Step>(result * step<Step>(reduction.postscale)) / divisor);
}

inline double widened(Fp16 value) { return farandole::fp16_to_fp32(value.bits); }
inline double widened(Bf16 value) { return farandole::bf16_to_fp32(value.bits); }
inline double widened(float value) { return value; }
inline double widened(double value) { return value; }

template <class T>
T narrowed(double value) {
  if constexpr (std::is_same_v<T, Fp16>) {
    return {farandole::fp32_to_fp16(static_cast<float>(value))};
  } else if constexpr (std::is_same_v<T, Bf16>) {
    return {farandole::fp32_to_bf16(static_cast<float>(value))};
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
T clamped(double value) {
  if (std::isnan(value)) {
    return 0;
  }
  const long double lowest = std::numeric_limits<T>::min();
  const long double highest = std::numeric_limits<T>::max();
  const long double whole = std::trunc(static_cast<long double>(value));
  return static_cast<T>(whole < lowest ? lowest : whole > highest ? highest : whole);
}

template <class T>
T integer_reference(const Reduction& reduction, const std::vector<T>& values) {
  const auto scaled = [&](T value, double factor) {
    return factor == 1 ? value : clamped<T>(static_cast<double>(value) * factor);
  };
  const bool averages = reduction.op == ReduceOp::Average;
  __int128 result = scaled(values[0], reduction.prescale);
  for (size_t s = 1; s < values.size(); ++s) {
    const __int128 value = scaled(values[s], reduction.prescale);
    switch (reduction.op) {
      case ReduceOp::Min: result = result < value ? result : value; break;
      case ReduceOp::Max: result = result > value ? result : value; break;
      case ReduceOp::Product: {
        const auto wide = static_cast<unsigned __int128>(static_cast<T>(result));
        result = static_cast<T>(wide * static_cast<unsigned __int128>(value));
        break;
      }
      default: result += value;
    }
    if (!averages) {
      result = static_cast<T>(result);
    }
  }
  if (averages && reduction.postscale != 1) {
    return clamped<T>(static_cast<double>(result) * reduction.postscale / reduction.divisor);
  }
  return averages ? static_cast<T>(result / reduction.divisor) : scaled(static_cast<T>(result), reduction.postscale);
}

template <class T>
T reduced(const Reduction& reduction, const std::vector<T>& values) {
  if constexpr (std::is_same_v<T, Truth>) {
    const bool all = reduction.op == ReduceOp::Min || reduction.op == ReduceOp::Product;
    bool result = values[0].byte != 0;
    for (const Truth value : values) {
      result = all ? result && value.byte != 0 : result || value.byte != 0;
    }
    return {static_cast<uint8_t>(result)};
  } else if constexpr (std::is_integral_v<T>) {
    return integer_reference(reduction, values);
  } else {
    std::vector<double> wide;
    for (const T value : values) {
      wide.push_back(widened(value));
    }
    using Step = std::conditional_t<std::is_same_v<T, double>, double, float>;
    return narrowed<T>(float_reference<Step>(reduction, wide));
  }
}

template <class T>
bool same(T got, T expected) {
  if constexpr (Half<T> || std::is_floating_point_v<T>) {
    if (std::isnan(widened(expected))) {
      return std::isnan(widened(got));
    }
  }
  return std::memcmp(&got, &expected, sizeof got) == 0;
}

template <class T>
T random_value(std::mt19937_64& random) {
  const uint64_t bits = random();
  T value;
  std::memcpy(&value, &bits, sizeof value);
  if constexpr (Half<T> || std::is_floating_point_v<T>) {
    // Random bits are mostly huge or tiny values, so every second one has the size of a gradient.
    if ((bits >> 63) != 0) {
      return narrowed<T>(static_cast<double>(static_cast<int64_t>(bits << 1)) * 0x1p-62);
    }
  } else if constexpr (std::is_same_v<T, Truth>) {
    value.byte &= (bits >> 63) != 0 ? 0x80 : 0;
  } else if ((bits >> 60) == 0) {
    return (bits & 1) != 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max();
  }
  return value;
}

}  // namespace reference
