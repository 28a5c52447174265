// Measures the speed of a += b per element type and SIMD level, compared with memcpy and the portable kernels.
//
// GB/s counts the bytes of `a` once, per second of this thread's processor time, which other load of the machine does
// not change. Each round measures all cells one after another, and the table shows medians over the rounds. Ratios are
// more reliable than absolute numbers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/reduce.h"

using namespace farandole;

namespace {

constexpr size_t kSizes[] = {size_t{32} << 10, size_t{512} << 10, size_t{64} << 20};
constexpr uint64_t kCellNs = 4'000'000;
constexpr uint64_t kBatch = 4;  // reading the clock is a system call

struct Case {
  const char* name;
  DType dtype;
  Reduction reduction;
};

const Case kCases[] = {
    {"float32 sum", DType::Float32, {.op = ReduceOp::Sum}},
    {"float32 average of 2", DType::Float32, {.op = ReduceOp::Average, .divisor = 2}},
    {"float32 average of 3", DType::Float32, {.op = ReduceOp::Average, .divisor = 3}},
    {"float32 min", DType::Float32, {.op = ReduceOp::Min}},
    {"float16 sum", DType::Float16, {.op = ReduceOp::Sum}},
    {"float16 average of 2", DType::Float16, {.op = ReduceOp::Average, .divisor = 2}},
    {"bfloat16 sum", DType::BFloat16, {.op = ReduceOp::Sum}},
    {"bfloat16 average of 2", DType::BFloat16, {.op = ReduceOp::Average, .divisor = 2}},
    {"float64 sum", DType::Float64, {.op = ReduceOp::Sum}},
    {"int32 sum", DType::Int32, {.op = ReduceOp::Sum}},
    {"int32 average of 2", DType::Int32, {.op = ReduceOp::Average, .divisor = 2}},
    {"int64 sum", DType::Int64, {.op = ReduceOp::Sum}},
    {"int64 average of 2", DType::Int64, {.op = ReduceOp::Average, .divisor = 2}},
    {"uint8 sum", DType::UInt8, {.op = ReduceOp::Sum}},
    {"bool or", DType::Bool, {.op = ReduceOp::Sum}},
};

// Values of the size of gradients, so that adding the same `b` repeatedly does not lead to infinities.
void fill(DType dtype, std::vector<std::byte>& buffer, std::mt19937& random) {
  std::normal_distribution<float> gradient(0, 1e-3F);
  for (size_t at = 0; at + 8 <= buffer.size(); at += size_of(dtype)) {
    const float value = gradient(random);
    const double wide = value;
    const uint16_t half = dtype == DType::Float16 ? fp32_to_fp16(value) : fp32_to_bf16(value);
    const uint64_t whole = random();
    const void* from = dtype == DType::Float32   ? static_cast<const void*>(&value)
                       : dtype == DType::Float64 ? static_cast<const void*>(&wide)
                       : is_floating(dtype)      ? static_cast<const void*>(&half)
                                                 : static_cast<const void*>(&whole);
    std::memcpy(buffer.data() + at, from, size_of(dtype));
  }
}

uint64_t thread_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

template <class F>
double gigabytes_per_second(size_t bytes, F&& body) {
  body();
  uint64_t runs = 0;
  const uint64_t start = thread_ns();
  uint64_t now = start;
  do {
    for (uint64_t i = 0; i < kBatch; ++i) body();
    runs += kBatch;
    now = thread_ns();
  } while (now - start < kCellNs);
  return static_cast<double>(bytes) * static_cast<double>(runs) / static_cast<double>(now - start);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

using Cell = std::pair<std::string, std::string>;  // case, level

std::map<Cell, double> measure(size_t bytes, int rounds) {
  std::mt19937 random(1);
  std::vector<std::byte> a(bytes);
  std::vector<std::byte> b(bytes);
  std::map<Cell, std::vector<double>> samples;
  for (int round = 0; round < rounds; ++round) {
    for (const Case& one : kCases) {
      fill(one.dtype, b, random);
      for (const char* level : simd_levels()) {
        force_simd_level(level);
        std::memcpy(a.data(), b.data(), bytes);
        const void* const sources[] = {a.data(), b.data()};
        samples[{one.name, level}].push_back(gigabytes_per_second(
            bytes, [&] { reduce(one.dtype, one.reduction, a.data(), sources, bytes / size_of(one.dtype)); }));
      }
      samples[{"memcpy", ""}].push_back(gigabytes_per_second(bytes, [&] { std::memcpy(a.data(), b.data(), bytes); }));
    }
  }
  std::map<Cell, double> medians;
  for (const auto& [cell, values] : samples) {
    medians[cell] = median(values);
  }
  return medians;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 5;
  const std::vector<const char*> levels = simd_levels();
  for (const size_t bytes : kSizes) {
    const std::map<Cell, double> medians = measure(bytes, rounds);
    const double copy = medians.at({"memcpy", ""});
    std::printf("\n%zu KiB, memcpy %.1f GB/s, median of %d rounds\n%-22s", bytes >> 10, copy, rounds, "GB/s");
    for (const char* level : levels) {
      std::printf("%9s", level);
    }
    std::printf("  best/scalar  best/memcpy\n");
    for (const Case& one : kCases) {
      std::printf("%-22s", one.name);
      for (const char* level : levels) {
        std::printf("%9.1f", medians.at({one.name, level}));
      }
      const double best = medians.at({one.name, levels.back()});
      std::printf("%13.1f%13.2f\n", best / medians.at({one.name, levels.front()}), best / copy);
    }
  }
  return 0;
}
