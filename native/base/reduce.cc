#include "base/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/int8_blocks.h"
#include "base/reduce_kernel.h"

namespace farandole {

ReduceKernel& ReduceTable::at(DType dtype, Combine combine, Scaling scaling) {
  return kernels[static_cast<int>(dtype)][static_cast<int>(combine)][static_cast<int>(scaling)];
}

namespace {

#if defined(__x86_64__)
struct Supported {
  bool avx2, avx512;
};

/// Returns what the processor has and the system saves for it. Not by `__builtin_cpu_supports`: Zig's compiler, which
/// makes the released wheels, answers no to everything, and Clang knows "f16c" only from version 17 on.
Supported supported() {
  unsigned eax = 0, ebx = 0, features = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &features, &edx) == 0 || (features & bit_OSXSAVE) == 0) return {};
  unsigned saved = 0, ecx = 0;
  asm volatile("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return {};
  constexpr unsigned kYmm = 0x6, kZmm = 0xE6;  // parts of the registers' state, in XCR0
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  const bool avx2 = (saved & kYmm) == kYmm && (features & bit_F16C) != 0 && (ebx & bit_AVX2) != 0;
  return {avx2, avx2 && (saved & kZmm) == kZmm && (ebx & kAvx512) == kAvx512};
}
#endif

std::vector<ReduceTable> supported_tables() {
  std::vector<ReduceTable> tables(1);
  tables[0].level = "scalar";
  fill_scalar(tables[0]);
  [[maybe_unused]] const auto add = [&tables](const char* level, void (*fill)(ReduceTable&)) {
    tables.push_back(tables.back());
    tables.back().level = level;
    fill(tables.back());
  };
#if defined(__x86_64__)
  const Supported found = supported();
  if (found.avx2) add("avx2", fill_avx2);
  if (found.avx512) add("avx512", fill_avx512);
#elif defined(__aarch64__)
  add("neon", fill_neon);
#endif
  return tables;
}

const std::vector<ReduceTable>& tables() {
  static const std::vector<ReduceTable> all = supported_tables();
  return all;
}

std::atomic<const ReduceTable*>& active() {
  static std::atomic<const ReduceTable*> active{&tables().back()};
  return active;
}

Combine combine_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Min: return Combine::Min;
    case ReduceOp::Max: return Combine::Max;
    case ReduceOp::Product: return Combine::Product;
    case ReduceOp::Average:
    case ReduceOp::Sum:
    case ReduceOp::Adasum: break;  // check_reduction() has refused Adasum
  }
  return Combine::Sum;
}

bool is_power_of_two(int value) { return (value & (value - 1)) == 0; }

Scaling scaling_of(DType dtype, ReduceJob& job) {
  if (is_floating(dtype)) {
    // The bf16 kernels need zeros in the lower half of a NaN's payload; a caller's NaN may have any bits there.
    job.prescale = std::isnan(job.prescale) ? NAN : job.prescale;
    job.postscale = std::isnan(job.postscale) ? NAN : job.postscale;
    // Dividing by a power of two and multiplying by its reciprocal give the same bits; multiplying is faster.
    if (is_power_of_two(job.divisor)) {
      job.postscale /= job.divisor;
      job.divisor = 1;
      if (job.prescale == 1) {
        return job.postscale == 1 ? Scaling::Plain : Scaling::Factored;
      }
    }
    return Scaling::Full;
  }
  if (job.prescale == 1 && job.postscale == 1) {
    return job.divisor == 1 ? Scaling::Plain : Scaling::Factored;
  }
  return Scaling::Full;
}

}  // namespace

const ReduceTable& active_table() { return *active().load(std::memory_order_relaxed); }

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Average: return "average";
    case ReduceOp::Sum: return "sum";
    case ReduceOp::Adasum: return "adasum";
    case ReduceOp::Min: return "min";
    case ReduceOp::Max: return "max";
    case ReduceOp::Product: return "product";
  }
  if (is_int8(op)) return averages(op) ? "average by int8" : "sum by int8";
  return "unknown";
}

void check_reduction(DType dtype, const Reduction& reduction) {
  if (!reducible(dtype)) {
    throw Error::invalid("", std::string("there is no reduction for dtype ") + name_of(dtype));
  }
  switch (reduction.op) {
    case ReduceOp::Average:
      if (dtype == DType::Bool) {
        throw Error::invalid("", "bool tensors cannot be averaged; use sum (or), product (and), min or max");
      }
      if (reduction.divisor < 1) {
        throw Error::invalid("", "average needs a divisor of at least 1, got " + std::to_string(reduction.divisor));
      }
      break;
    case ReduceOp::Sum:
    case ReduceOp::Min:
    case ReduceOp::Max:
    case ReduceOp::Product: break;
    default: throw Error::invalid("", std::string(name_of(reduction.op)) + " is not an element-wise reduction");
  }
  if (dtype == DType::Bool && (reduction.prescale != 1 || reduction.postscale != 1)) {
    throw Error::invalid("", "bool tensors cannot be scaled; leave prescale and postscale at 1");
  }
}

void reduce(DType dtype, const Reduction& reduction, void* dst, std::span<const void* const> sources, size_t count,
            void* also) {
  check_reduction(dtype, reduction);
  if (sources.empty()) {
    throw Error::internal("a reduction without sources");
  }
  ReduceJob job{dst,
                also,
                sources.data(),
                sources.size(),
                count,
                reduction.prescale,
                reduction.postscale,
                reduction.op == ReduceOp::Average ? reduction.divisor : 1};
  const Scaling scaling = scaling_of(dtype, job);
  if (scaling == Scaling::Plain && sources.size() == 1 && dtype != DType::Bool) {
    for (void* to : {dst, also})
      if (to != nullptr && to != sources[0] && count != 0) std::memcpy(to, sources[0], count * size_of(dtype));
    return;
  }
  const Combine combine = combine_of(reduction.op);
  active_table().kernels[static_cast<int>(dtype)][static_cast<int>(combine)][static_cast<int>(scaling)](job);
}

void scale(DType dtype, double factor, void* data, size_t count) {
  const void* const source = data;
  reduce(dtype, Reduction{.op = ReduceOp::Sum, .postscale = factor}, data, {&source, 1}, count);
}

void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) { active_table().copy(to, from, bytes); }

void stream_bytes(std::byte* to, const std::byte* from, size_t bytes) { active_table().stream(to, from, bytes); }

const char* simd_level() { return active_table().level; }

std::vector<const char*> simd_levels() {
  std::vector<const char*> levels;
  for (const ReduceTable& table : tables()) {
    levels.push_back(table.level);
  }
  return levels;
}

void force_simd_level(const char* level) {
  for (const ReduceTable& table : tables()) {
    if (std::strcmp(table.level, level) == 0) {
      active().store(&table, std::memory_order_relaxed);
      return;
    }
  }
  std::string known;
  for (const ReduceTable& table : tables()) {
    known += (known.empty() ? "" : ", ") + std::string(table.level);
  }
  throw Error::invalid("", "unknown SIMD level '" + std::string(level) + "'; this processor runs: " + known);
}

}  // namespace farandole
