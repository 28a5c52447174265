#pragma once

#include <cstddef>

namespace farandole {

/// Settings that may change during a job. They are the same on all ranks and change on all ranks between the same two
/// plans; rank 0 decides when. They do not change results, except that `hierarchical` changes the last bits of sums of
/// floats.
struct Knobs {
  size_t fusion_threshold = size_t{128} << 20;  // bytes of a bucket; 0 disables fusion. Used by rank 0 only
  size_t slot_bytes = size_t{128} << 10;  // bytes of a slot in use, for the chunks of large reductions within a host
  size_t link_chunk = size_t{256} << 10;  // largest chunk between hosts
  size_t link_small = size_t{64} << 10;   // most bytes received per rank for one step between hosts
  bool hierarchical = true;               // two levels, if the hosts form a grid

  bool operator==(const Knobs&) const = default;

  static constexpr size_t kLeastChunk = 4096;

  /// Returns whether the values are valid. Chunks must hold whole elements of every type.
  [[nodiscard]] bool valid() const {
    const auto is_chunk = [](size_t bytes) { return bytes >= kLeastChunk && bytes % 64 == 0; };
    return is_chunk(slot_bytes) && is_chunk(link_chunk);
  }
};

}  // namespace farandole
