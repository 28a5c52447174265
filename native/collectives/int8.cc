#include "collectives/int8.h"

#include <algorithm>
#include <vector>

#include "base/int8_blocks.h"
#include "collectives/lent.h"

namespace farandole {
namespace {

/// One run over one bucket.
class Int8Allreduce {
 public:
  Int8Allreduce(World& world, int rank, int size, std::span<const Piece> pieces)
      : world_(world), me_(static_cast<size_t>(rank)), n_(static_cast<size_t>(size)), pieces_(pieces) {
    for (const Piece& piece : pieces) {
      const size_t count = piece.bytes / sizeof(float);
      places_.push_back({blocks_, bytes_, count});
      blocks_ += int8_blocks(count);
      bytes_ += int8_bytes(count);
    }
    packed_.resize(bytes_);
    arrived_.resize(n_ * share(me_));
  }

  void run(float factor) {
    for (size_t i = 0; i < pieces_.size(); ++i)
      quantise({reinterpret_cast<const float*>(pieces_[i].in), places_[i].count}, packed_.data() + places_[i].byte);
    collect();
    combine(factor);
    spread();
    for (size_t i = 0; i < pieces_.size(); ++i)
      dequantise(packed_.data() + places_[i].byte, {reinterpret_cast<float*>(pieces_[i].out), places_[i].count});
  }

 private:
  /// A tensor's first block, the byte where that begins, and the number of values.
  struct Place {
    size_t block, byte, count;
  };

  [[nodiscard]] size_t first_block(size_t owner) const { return owner * blocks_ / n_; }

  /// Returns the byte where a block begins; the end of all for the block after the last.
  [[nodiscard]] size_t byte_of(size_t block) const {
    if (block == blocks_) return bytes_;
    const Place& place = place_of(block);
    return place.byte + int8_bytes((block - place.block) * kInt8Block);
  }

  /// Returns the tensor of a block; tensors without values have none.
  [[nodiscard]] const Place& place_of(size_t block) const {
    return *(std::ranges::upper_bound(places_, block, {}, &Place::block) - 1);
  }

  [[nodiscard]] size_t share(size_t owner) const {
    return byte_of(first_block(owner + 1)) - byte_of(first_block(owner));
  }

  /// Gathers this rank's shard of every rank's blocks.
  void collect() {
    std::vector<const std::byte*> in(n_);
    std::vector<std::byte*> out(n_);
    for (size_t peer = 0; peer < n_; ++peer) {
      in[peer] = packed_.data() + byte_of(first_block(peer));
      out[peer] = arrived_.data() + peer * share(me_);
    }
    world_.alltoall(in, out, [this](int, int to) { return share(static_cast<size_t>(to)); });
  }

  /// Adds the ranks' shards; the sum replaces that of rank 0.
  void combine(float factor) {
    std::vector<const std::byte*> sources(n_);
    const size_t begin = byte_of(first_block(me_));
    for (size_t block = first_block(me_); block < first_block(me_ + 1); ++block) {
      const Place& place = place_of(block);
      const size_t count = std::min(kInt8Block, place.count - (block - place.block) * kInt8Block);
      const size_t at = byte_of(block) - begin;
      for (size_t peer = 0; peer < n_; ++peer) sources[peer] = arrived_.data() + peer * share(me_) + at;
      sum_blocks(sources, count, factor, arrived_.data() + at);
    }
  }

  /// Distributes all shards to all ranks.
  void spread() {
    std::vector<std::byte*> out(n_);
    std::vector<size_t> sizes(n_);
    for (size_t peer = 0; peer < n_; ++peer) {
      out[peer] = packed_.data() + byte_of(first_block(peer));
      sizes[peer] = share(peer);
    }
    world_.allgather(arrived_.data(), out, sizes);
  }

  World& world_;
  size_t me_, n_;
  std::span<const Piece> pieces_;
  std::vector<Place> places_;  // one for each piece
  size_t blocks_ = 0, bytes_ = 0;
  std::vector<std::byte> packed_;   // the blocks of all tensors: this rank's, then the sums
  std::vector<std::byte> arrived_;  // this rank's shard, from each rank
};

}  // namespace

void int8_allreduce(World& world, int rank, int size, std::span<const Piece> pieces, const Reduction& reduction) {
  if (BucketView(pieces).bytes() == 0) return;
  // One factor for all: the scales of the blocks carry it.
  const double factor = reduction.prescale * reduction.postscale / reduction.divisor;
  Lent<Int8Allreduce>(world, world, rank, size, pieces)->run(static_cast<float>(factor));
}

}  // namespace farandole
