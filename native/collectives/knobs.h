#pragma once

#include <cstddef>

namespace farandole {

/// What can be turned while a job runs. All ranks have the same, and turn them between the same two plans; rank 0 says
/// when. None of them changes a result, but `hierarchical` the last bits of sums of floats.
struct Knobs {
  size_t fusion_threshold = size_t{128} << 20;  // bytes of a bucket; 0: nothing is fused. Matters to rank 0 only
  size_t slot_bytes = size_t{128} << 10;        // of a slot in use, for the chunks of large reductions within a host
  size_t link_chunk = size_t{256} << 10;        // most bytes of a chunk between hosts
  size_t link_small = size_t{64} << 10;         // so many bytes from others to a rank take one step between hosts
  bool hierarchical = true;                     // two levels, where the hosts make a grid

  bool operator==(const Knobs&) const = default;

  static constexpr size_t kLeastChunk = 4096;

  /// Can ranks work with these? Chunks hold whole elements of every type.
  [[nodiscard]] bool valid() const {
    const auto is_chunk = [](size_t bytes) { return bytes >= kLeastChunk && bytes % 64 == 0; };
    return is_chunk(slot_bytes) && is_chunk(link_chunk);
  }
};

}  // namespace farandole
