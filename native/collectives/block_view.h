#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "base/int8_blocks.h"
#include "collectives/piece.h"

namespace farandole {

/// A bucket of float32 tensors as blocks of 8-bit integers, tensor after tensor. Blocks do not cross tensors.
class BlockView {
 public:
  explicit BlockView(std::span<const Piece> pieces) {
    for (const Piece& piece : pieces) {
      if (piece.bytes == 0) continue;
      const size_t count = piece.bytes / sizeof(float);
      tensors_.push_back({blocks_, bytes_, count, piece});
      blocks_ += int8_blocks(count);
      bytes_ += int8_bytes(count);
    }
  }

  [[nodiscard]] size_t blocks() const { return blocks_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

  /// Returns the first block of the segment of `owner`, one of `owners`; the number of blocks for the owner after the
  /// last.
  [[nodiscard]] size_t first_block(size_t owner, size_t owners) const { return owner * blocks_ / owners; }

  /// Returns the byte where a block begins; the end of all for the block after the last.
  [[nodiscard]] size_t byte_of(size_t block) const {
    if (block == blocks_) return bytes_;
    const Tensor& tensor = *tensor_of(block);
    return tensor.byte + int8_bytes((block - tensor.block) * kInt8Block);
  }

  /// Calls `visit(values, done)` for the values of each tensor in the blocks [begin, end). `values` is a Piece cut to
  /// the blocks; `done` is the number of bytes of the blocks before it.
  template <class Visit>
  void for_each(size_t begin, size_t end, Visit visit) const {
    if (begin == end) return;
    size_t done = 0;
    for (auto tensor = tensor_of(begin); begin < end; ++tensor) {
      const size_t first = (begin - tensor->block) * kInt8Block;
      const size_t last = std::min((end - tensor->block) * kInt8Block, tensor->count);
      const size_t skip = first * sizeof(float);
      visit(Piece{tensor->piece.in + skip, tensor->piece.out + skip, (last - first) * sizeof(float)}, done);
      done += int8_bytes(last - first);
      begin += int8_blocks(last - first);
    }
  }

 private:
  struct Tensor {
    size_t block, byte, count;  // its first block, where that begins, the number of values
    Piece piece;
  };

  [[nodiscard]] std::vector<Tensor>::const_iterator tensor_of(size_t block) const {
    return std::ranges::upper_bound(tensors_, block, {}, &Tensor::block) - 1;
  }

  std::vector<Tensor> tensors_;  // those with values
  size_t blocks_ = 0, bytes_ = 0;
};

[[nodiscard]] inline std::span<const float> inputs_of(const Piece& values) {
  return {reinterpret_cast<const float*>(values.in), values.bytes / sizeof(float)};
}
[[nodiscard]] inline std::span<float> outputs_of(const Piece& values) {
  return {reinterpret_cast<float*>(values.out), values.bytes / sizeof(float)};
}

}  // namespace farandole
