// Every dtype, operation and scaling at every SIMD level, against reduce_reference.h.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/half.h"
#include "base/reduce.h"
#include "check.h"
#include "reduce_reference.h"

using namespace farandole;

namespace {

using reference::Bf16;
using reference::Fp16;
using reference::Truth;

constexpr uint8_t kCanary = 0xA5;

#if defined(__SANITIZE_THREAD__)
constexpr size_t kCountStep = 11;  // one thread has no races, so a sample suffices
#else
constexpr size_t kCountStep = 1;
#endif

struct Shape {
  size_t sources;
  size_t count;
  size_t offset;  // of every buffer from its allocation, in bytes
  int in_place;   // the source that is also the destination; -1: none
};

template <class T>
void check_shape(DType dtype, const Reduction& reduction, const Shape& shape, std::mt19937_64& random) {
  const size_t bytes = shape.count * sizeof(T);
  std::vector<std::vector<uint8_t>> inputs(shape.sources);
  std::vector<T> expected(shape.count);
  std::vector<std::vector<T>> columns(shape.count);
  for (std::vector<uint8_t>& input : inputs) {
    input.assign(shape.offset + bytes + 64, kCanary);
    for (size_t i = 0; i < shape.count; ++i) {
      columns[i].push_back(reference::random_value<T>(random));
      std::memcpy(input.data() + shape.offset + i * sizeof(T), &columns[i].back(), sizeof(T));
    }
  }
  for (size_t i = 0; i < shape.count; ++i) {
    expected[i] = reference::reduced(reduction, columns[i]);
  }
  for (const char* level : simd_levels()) {
    force_simd_level(level);
    std::vector<std::vector<uint8_t>> buffers = inputs;
    std::vector<uint8_t> separate(shape.offset + bytes + 64, kCanary);
    std::vector<uint8_t>& target = shape.in_place < 0 ? separate : buffers[static_cast<size_t>(shape.in_place)];
    std::vector<const void*> sources;
    for (const std::vector<uint8_t>& buffer : buffers) {
      sources.push_back(buffer.data() + shape.offset);
    }
    // The second destination, if any, is another source (as with slots) or separate memory.
    std::vector<uint8_t> spare(shape.offset + bytes + 64, kCanary);
    std::vector<uint8_t>* also = nullptr;
    if (shape.count % 3 == 1) also = &spare;
    if (shape.count % 3 == 2) also = &buffers.back() == &target ? &spare : &buffers.back();
    reduce(dtype, reduction, target.data() + shape.offset, sources, shape.count,
           also == nullptr ? nullptr : also->data() + shape.offset);
    check::that(also == nullptr || *also == target, "the result is the same in both places");

    const auto context = [&](size_t at) {
      return std::string(name_of(dtype)) + " " + name_of(reduction.op) + " " + level + ", element " +
             std::to_string(at) + " of " + std::to_string(shape.count) + ", sources " + std::to_string(shape.sources) +
             ", in place " + std::to_string(shape.in_place) + ", offset " + std::to_string(shape.offset) +
             ", factors " + std::to_string(reduction.prescale) + " " + std::to_string(reduction.postscale) + " / " +
             std::to_string(reduction.divisor);
    };
    for (size_t i = 0; i < shape.count; ++i) {
      T got;
      std::memcpy(&got, target.data() + shape.offset + i * sizeof(T), sizeof got);
      if (!reference::same(got, expected[i])) {
        check::fail("differs from the reference: " + context(i), std::source_location::current());
      }
    }
    for (size_t i = 0; i < target.size(); ++i) {
      if ((i < shape.offset || i >= shape.offset + bytes) && target[i] != kCanary) {
        check::fail("wrote outside of dst: " + context(i), std::source_location::current());
      }
    }
    for (size_t s = 0; s < buffers.size(); ++s) {
      if (&target != &buffers[s] && also != &buffers[s] && buffers[s] != inputs[s]) {
        check::fail("wrote to a source: " + context(s), std::source_location::current());
      }
    }
  }
}

std::vector<Reduction> reductions_of(DType dtype, size_t sources) {
  std::vector<Reduction> all;
  for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
    all.push_back({.op = op});
    if (dtype != DType::Bool) {
      all.push_back({.op = op, .prescale = 0.3});
      all.push_back({.op = op, .postscale = -1.7});
      all.push_back({.op = op, .prescale = 3.5, .postscale = 0.9});
    }
  }
  if (dtype != DType::Bool) {
    for (const int divisor : {static_cast<int>(sources), 3, 4}) {
      all.push_back({.op = ReduceOp::Average, .divisor = divisor});
    }
    all.push_back({.op = ReduceOp::Average, .prescale = 0.5, .divisor = 3});
    all.push_back({.op = ReduceOp::Average, .postscale = 2.5, .divisor = 3});
    all.push_back({.op = ReduceOp::Average, .prescale = 0.1, .postscale = 10, .divisor = 2});
    all.push_back({.op = ReduceOp::Sum, .prescale = NAN});
    all.push_back({.op = ReduceOp::Sum, .postscale = INFINITY});
    all.push_back({.op = ReduceOp::Max, .prescale = -1e300});
  }
  return all;
}

template <class T>
void test_dtype(DType dtype) {
  std::mt19937_64 random(static_cast<uint64_t>(dtype) + 1);
  for (const size_t sources : {1, 2, 3, 5}) {
    for (const Reduction& reduction : reductions_of(dtype, sources)) {
      for (size_t count = 0; count <= 67; count += kCountStep) {
        // Cycling through places and offsets with coprime periods covers every pair of them.
        const int in_place = static_cast<int>(count % (sources + 1)) - 1;
        check_shape<T>(dtype, reduction, {sources, count, (count * 3) % 7, in_place}, random);
      }
      check_shape<T>(dtype, reduction, {sources, 1031, 1, -1}, random);
      check_shape<T>(dtype, reduction, {sources, 1024, 0, static_cast<int>(sources) - 1}, random);
      // Long enough for stores to be aligned.
      check_shape<T>(dtype, reduction, {sources, 5003, 3 * sizeof(T), 0}, random);
    }
  }
  check_shape<T>(dtype, {.op = ReduceOp::Sum}, {2, 300'007, 4, 0}, random);
}

template <class T>
T reduced(DType dtype, const Reduction& reduction, std::vector<T> values) {
  std::vector<const void*> sources;
  for (const T& value : values) {
    sources.push_back(&value);
  }
  T result{};
  reduce(dtype, reduction, &result, sources, 1);
  return result;
}

void test_integers_by_hand() {
  const Reduction sum{.op = ReduceOp::Sum};
  const Reduction mean{.op = ReduceOp::Average, .divisor = 2};
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  CHECK_EQ(reduced<uint8_t>(DType::UInt8, sum, {200, 100}), 44);
  CHECK_EQ(reduced<int8_t>(DType::Int8, sum, {127, 1}), -128);
  CHECK_EQ(reduced<int64_t>(DType::Int64, sum, {kMost, 1}), kLeast);
  CHECK_EQ(reduced<int32_t>(DType::Int32, mean, {-3, 0}), -1);
  CHECK_EQ(reduced<int32_t>(DType::Int32, mean, {3, 0}), 1);
  CHECK_EQ(reduced<uint8_t>(DType::UInt8, mean, {255, 255}), 255);
  CHECK_EQ(reduced<int8_t>(DType::Int8, mean, {-128, -128}), -128);
  CHECK_EQ(reduced<int64_t>(DType::Int64, mean, {kMost, kMost}), kMost);
  CHECK_EQ(reduced<int64_t>(DType::Int64, mean, {kLeast, kLeast}), kLeast);
  CHECK_EQ(reduced<uint64_t>(DType::UInt64, mean, {UINT64_MAX, UINT64_MAX}), UINT64_MAX);
  // A multiplication by the rounded reciprocal gives 0 here.
  for (int ranks = 1; ranks < 200; ++ranks) {
    const std::vector<int32_t> ones(static_cast<size_t>(ranks), 1);
    CHECK_EQ(reduced<int32_t>(DType::Int32, {.op = ReduceOp::Average, .divisor = ranks}, ones), 1);
  }
  // Out of range clamps; a factor of 1 leaves 64-bit values exact.
  CHECK_EQ(reduced<int64_t>(DType::Int64, {.postscale = 1e300}, {1}), kMost);
  CHECK_EQ(reduced<int64_t>(DType::Int64, {.postscale = -1e300}, {1}), kLeast);
  CHECK_EQ(reduced<uint8_t>(DType::UInt8, {.postscale = -1}, {1}), 0);
  CHECK_EQ(reduced<int64_t>(DType::Int64, {.prescale = 1, .postscale = 2}, {3}), 6);
  CHECK_EQ(reduced<int16_t>(DType::Int16, {.op = ReduceOp::Product}, {-300, 300}), static_cast<int16_t>(-90000));
  CHECK_EQ(reduced<uint16_t>(DType::UInt16, {.op = ReduceOp::Product}, {65535, 65535}), 1);
}

void test_floats_by_hand() {
  for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product}) {
    CHECK(std::isnan(reduced<float>(DType::Float32, {.op = op}, {NAN, 1})));
    CHECK(std::isnan(reduced<float>(DType::Float32, {.op = op}, {1, NAN})));
    CHECK(std::isnan(reduced<double>(DType::Float64, {.op = op}, {1, NAN, 2})));
  }
  CHECK_EQ(reduced<uint16_t>(DType::Float16, {}, {0x7BFF, 0x7BFF}), 0x7C00);   // 65504 + 65504 is infinite
  CHECK_EQ(reduced<uint16_t>(DType::Float16, {}, {0x0001, 0x0001}), 0x0002);   // subnormals
  CHECK_EQ(reduced<uint16_t>(DType::BFloat16, {}, {0x0001, 0x0001}), 0x0002);  // subnormals
  // The average of two values whose sum overflows fp16 is finite, because rounding comes last.
  CHECK_EQ(reduced<uint16_t>(DType::Float16, {.op = ReduceOp::Average, .divisor = 2}, {0x7BFF, 0x7BFF}), 0x7BFF);
  // 2048 + 1 is not an fp16, 2048 + 1 + 1 is: one rounding instead of two.
  CHECK_EQ(reduced<uint16_t>(DType::Float16, {}, {0x6800, 0x3C00, 0x3C00}), 0x6801);
}

// Every bfloat16 alone and with another one, and the factor whose payload would round to zero.
void test_nan_payloads() {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<uint16_t>(i);
  }
  const std::vector<uint16_t> zeros(all.size());
  const double factor = std::bit_cast<double>(UINT64_MAX);
  for (const Reduction& reduction : {Reduction{}, Reduction{.op = ReduceOp::Max}, Reduction{.prescale = factor},
                                     Reduction{.postscale = factor}, Reduction{.postscale = 1.5}}) {
    std::vector<uint16_t> result(all.size());
    const void* const sources[] = {all.data(), zeros.data()};
    reduce(DType::BFloat16, reduction, result.data(), sources, all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const bool nan = std::isnan(bf16_to_fp32(all[i])) || std::isnan(reduction.prescale + reduction.postscale);
      check::equal(std::isnan(bf16_to_fp32(result[i])), nan, "bfloat16 " + std::to_string(i));
    }
  }
}

void test_scale() {
  std::vector<float> floats{1, -2, 3};
  scale(DType::Float32, 0.5, floats.data(), floats.size());
  CHECK(floats == (std::vector<float>{0.5F, -1, 1.5F}));
  std::vector<int32_t> ints{3, -3};
  scale(DType::Int32, 0.5, ints.data(), ints.size());
  CHECK(ints == (std::vector<int32_t>{1, -1}));
  scale(DType::Float32, 1, nullptr, 0);
}

void test_what_is_refused() {
  const auto refused = [](DType dtype, const Reduction& reduction) {
    return CHECK_THROWS(Error, check_reduction(dtype, reduction)).kind == ErrorKind::Invalid;
  };
  CHECK(refused(DType::Bool, {.op = ReduceOp::Average, .divisor = 2}));
  CHECK(refused(DType::Bool, {.op = ReduceOp::Sum, .prescale = 2}));
  CHECK(refused(DType::Float32, {.op = ReduceOp::Adasum}));
  CHECK(refused(DType::Float32, {.op = static_cast<ReduceOp>(6)}));
  CHECK(refused(DType::Float32, {.op = ReduceOp::Average, .divisor = 0}));
  CHECK(refused(static_cast<DType>(13), {.op = ReduceOp::Sum}));
  check_reduction(DType::Bool, {.op = ReduceOp::Sum, .divisor = 0});  // only Average divides
  float value = 0;
  CHECK(CHECK_THROWS(Error, reduce(DType::Float32, {}, &value, {}, 1)).kind == ErrorKind::Internal);
  const std::string known = CHECK_THROWS(Error, force_simd_level("sse9")).what();
  CHECK(known.find("sse9") != std::string::npos && known.find("scalar") != std::string::npos);
}

void test_copy() {
  std::mt19937 random(3);
  for (size_t bytes = 0; bytes < 5000; bytes = bytes < 700 ? bytes + 1 : bytes + 97) {
    const size_t from = random() % 70, to = random() % 70;
    std::vector<std::byte> source(bytes + 140), target(bytes + 140, std::byte{kCanary});
    for (std::byte& each : source) each = static_cast<std::byte>(random());
    std::vector<std::byte> expected = target;
    std::copy_n(source.begin() + static_cast<long>(from), bytes, expected.begin() + static_cast<long>(to));
    (bytes % 2 == 0 ? copy_bytes : stream_bytes)(target.data() + to, source.data() + from, bytes);
    check::that(target == expected, "copied, and nothing beside",
                std::to_string(bytes) + " bytes from " + std::to_string(from) + " to " + std::to_string(to));
  }
}

// The first use selects the table; under ThreadSanitizer this shows that several threads may do it at once.
void test_first_use_from_many_threads() {
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      const float value = static_cast<float>(t);
      check::equal(reduced<float>(DType::Float32, {}, {value, 1}), value + 1);
    });
  }
}

/// The levels are those that the kernel lists for this processor, independent of the names that the compiler knows.
void test_levels_of_this_processor() {
#if defined(__aarch64__)
  CHECK_EQ(std::string(simd_levels().back()), "neon");
  return;
#endif
  std::ifstream file("/proc/cpuinfo");
  std::string line, flags;
  while (flags.empty() && std::getline(file, line))
    if (line.starts_with("flags")) flags = line + " ";
  if (flags.empty()) return;  // not x86-64, or no /proc
  const auto has = [&](const char* flag) { return flags.find(" " + std::string(flag) + " ") != std::string::npos; };
  const bool avx2 = has("avx2") && has("f16c");
  const bool avx512 = avx2 && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl");
  CHECK_EQ(std::string(simd_levels().back()), avx512 ? "avx512" : avx2 ? "avx2" : "scalar");
}

}  // namespace

int main() {
  test_levels_of_this_processor();
  test_first_use_from_many_threads();
  CHECK_EQ(std::string(simd_level()), std::string(simd_levels().back()));
  CHECK_EQ(std::string(simd_levels().front()), "scalar");
  for (const char* level : simd_levels()) {
    force_simd_level(level);
    CHECK_EQ(std::string(simd_level()), level);
    test_integers_by_hand();
    test_floats_by_hand();
    test_nan_payloads();
    test_scale();
    test_copy();
  }
  test_what_is_refused();
  test_dtype<uint8_t>(DType::UInt8);
  test_dtype<int8_t>(DType::Int8);
  test_dtype<int16_t>(DType::Int16);
  test_dtype<uint16_t>(DType::UInt16);
  test_dtype<int32_t>(DType::Int32);
  test_dtype<uint32_t>(DType::UInt32);
  test_dtype<int64_t>(DType::Int64);
  test_dtype<uint64_t>(DType::UInt64);
  test_dtype<Fp16>(DType::Float16);
  test_dtype<Bf16>(DType::BFloat16);
  test_dtype<float>(DType::Float32);
  test_dtype<double>(DType::Float64);
  test_dtype<Truth>(DType::Bool);
  return check::report();
}
