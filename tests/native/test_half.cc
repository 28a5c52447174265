// All 65,536 values of both 16-bit floats, and the fp32 values around every rounding boundary, against a slow model.
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>

#include "base/half.h"
#include "check.h"

using namespace farandole;

namespace {

struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);

  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] int special() const { return (1 << exponent_bits) - 1; }
};

// The value by the definition of the format, deliberately without bit tricks.
double model(const Format& format, uint16_t bits) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits >> format.mantissa_bits) & format.special();
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == format.special()) {
    return mantissa != 0 ? NAN : sign * INFINITY;
  }
  const int scale = (exponent == 0 ? 1 : exponent) - format.bias() - format.mantissa_bits;
  return sign * std::ldexp(mantissa + (exponent == 0 ? 0 : 1 << format.mantissa_bits), scale);
}

// Nearest value, ties to the even mantissa, by bisection over the ordered positive values.
uint16_t model_narrow(const Format& format, float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  int low = 0;
  int high = format.special() << format.mantissa_bits;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (model(format, static_cast<uint16_t>(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = model(format, static_cast<uint16_t>(low));
  // Infinity replaces the value one step above the largest.
  const double step = std::ldexp(1, format.special() - 1 - format.bias() - format.mantissa_bits);
  const double next = model(format, static_cast<uint16_t>(high));
  const double above = std::isinf(next) ? below + step : next;
  const double middle = (below + above) / 2;
  const bool up = magnitude > middle || (magnitude == middle && (low & 1) != 0);
  const int infinite = format.special() << format.mantissa_bits;
  return static_cast<uint16_t>(sign | (std::isinf(value) ? infinite : up ? high : low));
}

void check_narrow(const Format& format, float value) {
  const std::string context = format.name + std::string(" of ") + std::to_string(value);
  check::equal(format.narrow(value), model_narrow(format, value), context);
}

void test_every_value(const Format& format) {
  const uint16_t quiet = static_cast<uint16_t>(1U << (format.mantissa_bits - 1));
  for (int i = 0; i < 65536; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    const std::string context = format.name + std::string(" ") + std::to_string(i);
    const double expected = model(format, bits);
    const float wide = format.widen(bits);
    if (std::isnan(expected)) {
      check::that(std::isnan(wide), "NaN stays NaN", context);
      // Sign and payload survive both ways; a signaling NaN comes back quiet.
      check::equal(format.narrow(wide), static_cast<uint16_t>(bits | quiet), context);
      continue;
    }
    check::equal(static_cast<double>(wide), expected, context);
    check::equal(std::signbit(wide), (bits & 0x8000) != 0, context);
    check::equal(format.narrow(wide), bits, context);
  }
}

void test_rounding(const Format& format) {
  for (int i = 0; i < format.special() << format.mantissa_bits; ++i) {
    // Between this value and the next: the middle, and one fp32 step to its left and right.
    const double below = model(format, static_cast<uint16_t>(i));
    const double above = i + 1 == format.special() << format.mantissa_bits
                             ? 2 * below - model(format, static_cast<uint16_t>(i - 1))
                             : model(format, static_cast<uint16_t>(i + 1));
    const float middle = static_cast<float>((below + above) / 2);
    for (const float value : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, INFINITY)}) {
      check_narrow(format, value);
      check_narrow(format, -value);
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isnan(value)) {
      check_narrow(format, value);
    }
  }
  for (const float value : {0.0F, 1e-45F, 1e-38F, 65519.996F, 65520.0F, 65536.0F, 3.4e38F, INFINITY}) {
    check_narrow(format, value);
    check_narrow(format, -value);
  }
}

void test_nan(const Format& format) {
  // A payload only in the bits that are cut off must not become an infinity.
  for (const uint32_t bits : {0x7F800001U, 0xFF800001U, 0x7FC00000U, 0xFFFFFFFFU, 0x7F801000U}) {
    const uint16_t narrow = format.narrow(std::bit_cast<float>(bits));
    check::that(std::isnan(model(format, narrow)), "NaN stays NaN", format.name);
    check::equal((narrow & 0x8000) != 0, bits >> 31 == 1, format.name);
  }
}

}  // namespace

int main() {
  for (const Format& format :
       {Format{"fp16", 5, 10, &fp16_to_fp32, &fp32_to_fp16}, Format{"bf16", 8, 7, &bf16_to_fp32, &fp32_to_bf16}}) {
    test_every_value(format);
    test_rounding(format);
    test_nan(format);
  }
  static_assert(fp32_to_fp16(1.0F) == 0x3C00 && fp32_to_bf16(1.0F) == 0x3F80);
  return check::report();
}
