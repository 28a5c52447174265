#include "base/int8_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/reduce_kernel.h"

namespace farandole {
namespace {

/// The values of one block.
struct Block {
  float values[kInt8Block];
};

float scale_at(const std::byte* block) {
  float scale = 0;
  std::memcpy(&scale, block, sizeof scale);
  return scale;
}

void write_block(const ReduceTable& table, const float* values, size_t count, std::byte* to) {
  const float scale = table.quantise(values, count, to + sizeof(float));
  std::memcpy(to, &scale, sizeof scale);
}

/// Calls `visit(begin, count)` for the values of each block.
template <class Visit>
void for_each_block(size_t count, Visit visit) {
  for (size_t begin = 0; begin < count; begin += kInt8Block) visit(begin, std::min(kInt8Block, count - begin));
}

}  // namespace

void quantise(std::span<const float> values, std::byte* to) {
  const ReduceTable& table = active_table();
  for_each_block(values.size(), [&](size_t begin, size_t count) {
    write_block(table, values.data() + begin, count, to + int8_bytes(begin));
  });
}

void dequantise(const std::byte* from, std::span<float> values) {
  const ReduceTable& table = active_table();
  for_each_block(values.size(), [&](size_t begin, size_t count) {
    const std::byte* block = from + int8_bytes(begin);
    float* to = values.data() + begin;
    std::fill_n(to, count, 0.0F);
    table.add_block(block + sizeof(float), scale_at(block), count, to);
  });
}

void sum_runs(std::span<const std::byte* const> sources, size_t count, float factor, std::byte* to) {
  const ReduceTable& table = active_table();
  for_each_block(count, [&](size_t begin, size_t values) {
    const size_t at = int8_bytes(begin);
    Block sum{};
    for (const std::byte* run : sources)
      table.add_block(run + at + sizeof(float), factor * scale_at(run + at), values, sum.values);
    write_block(table, sum.values, values, to + at);
  });
}

void feed_error(std::span<float> values, float* error) {
  const ReduceTable& table = active_table();
  for_each_block(values.size(), [&](size_t begin, size_t count) {
    float* value = values.data() + begin;
    float* lost = error + begin;
    for (size_t i = 0; i < count; ++i) value[i] += lost[i];
    std::byte kept[kInt8Block];
    const float scale = table.quantise(value, count, kept);
    Block sent{};
    table.add_block(kept, scale, count, sent.values);
    if (std::isnan(scale)) {
      std::fill_n(lost, count, 0.0F);
      return;
    }
    for (size_t i = 0; i < count; ++i) lost[i] = value[i] - sent.values[i];
    std::copy_n(sent.values, count, value);
  });
}

}  // namespace farandole
