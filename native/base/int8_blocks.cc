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
  std::ranges::fill(values, 0.0F);
  for_each_block(values.size(), [&](size_t begin, size_t count) {
    const std::byte* block = from + int8_bytes(begin);
    table.add_block(block + sizeof(float), scale_at(block), count, values.data() + begin);
  });
}

void sum_blocks(std::span<const std::byte* const> sources, size_t count, float factor, std::byte* to) {
  const ReduceTable& table = active_table();
  Block sum{};
  for (const std::byte* block : sources)
    table.add_block(block + sizeof(float), factor * scale_at(block), count, sum.values);
  write_block(table, sum.values, count, to);
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
    for (size_t i = 0; i < count; ++i) lost[i] = std::isnan(scale) ? 0.0F : value[i] - sent.values[i];
  });
}

}  // namespace farandole
