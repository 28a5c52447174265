#include "base/int8_blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/reduce_kernel.h"

namespace farandole {
namespace {

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
    table.read_block(block + sizeof(float), scale_at(block), count, values.data() + begin);
  });
}

void sum_runs(std::span<const std::byte* const> sources, size_t count, float factor, std::byte* to) {
  const ReduceTable& table = active_table();
  for_each_block(count, [&](size_t begin, size_t values) {
    const size_t at = int8_bytes(begin);
    float sum[kInt8Block];
    BlockKernel take = table.read_block;  // the first one; the others are added
    for (const std::byte* run : sources) {
      take(run + at + sizeof(float), factor * scale_at(run + at), values, sum);
      take = table.add_block;
    }
    write_block(table, sum, values, to + at);
  });
}

void feed_error(std::span<float> values, float* error) {
  const ReduceTable& table = active_table();
  for_each_block(values.size(),
                 [&](size_t begin, size_t count) { table.feed_block(values.data() + begin, count, error + begin); });
}

}  // namespace farandole
