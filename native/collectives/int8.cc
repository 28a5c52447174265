#include "collectives/int8.h"

#include <vector>

#include "collectives/block_view.h"
#include "collectives/lent.h"

namespace farandole {
namespace {

/// One run over one bucket.
class Int8Allreduce {
 public:
  Int8Allreduce(World& world, int rank, int size, std::span<const Piece> pieces)
      : world_(world),
        me_(static_cast<size_t>(rank)),
        n_(static_cast<size_t>(size)),
        blocks_(pieces),
        packed_(blocks_.bytes()),
        arrived_(n_ * share(me_)) {}

  void run(float factor) {
    blocks_.for_each(0, blocks_.blocks(),
                     [&](const Piece& values, size_t done) { quantise(inputs_of(values), packed_.data() + done); });
    collect();
    combine(factor);
    spread();
    blocks_.for_each(0, blocks_.blocks(),
                     [&](const Piece& values, size_t done) { dequantise(packed_.data() + done, outputs_of(values)); });
  }

 private:
  [[nodiscard]] size_t begin_of(size_t owner) const { return blocks_.byte_of(blocks_.first_block(owner, n_)); }
  [[nodiscard]] size_t share(size_t owner) const { return begin_of(owner + 1) - begin_of(owner); }

  /// Gathers this rank's shard of every rank's blocks.
  void collect() {
    std::vector<const std::byte*> in(n_);
    std::vector<std::byte*> out(n_);
    for (size_t peer = 0; peer < n_; ++peer) {
      in[peer] = packed_.data() + begin_of(peer);
      out[peer] = arrived_.data() + peer * share(me_);
    }
    world_.alltoall(in, out, [this](int, int to) { return share(static_cast<size_t>(to)); });
  }

  /// Adds the ranks' shards; the sum replaces that of rank 0.
  void combine(float factor) {
    std::vector<const std::byte*> sources(n_);
    const size_t shard = share(me_);
    blocks_.for_each(blocks_.first_block(me_, n_), blocks_.first_block(me_ + 1, n_),
                     [&](const Piece& values, size_t done) {
                       for (size_t peer = 0; peer < n_; ++peer) sources[peer] = arrived_.data() + peer * shard + done;
                       sum_runs(sources, values.bytes / sizeof(float), factor, arrived_.data() + done);
                     });
  }

  /// Distributes all shards to all ranks.
  void spread() {
    std::vector<std::byte*> out(n_);
    std::vector<size_t> sizes(n_);
    for (size_t peer = 0; peer < n_; ++peer) {
      out[peer] = packed_.data() + begin_of(peer);
      sizes[peer] = share(peer);
    }
    world_.allgather(arrived_.data(), out, sizes);
  }

  World& world_;
  size_t me_, n_;
  BlockView blocks_;
  std::vector<std::byte> packed_;   // the blocks of all tensors: this rank's, then the sums
  std::vector<std::byte> arrived_;  // this rank's shard, from each rank
};

}  // namespace

const char* int8_allreduce(World& world, int rank, int size, std::span<const Piece> pieces,
                           const Reduction& reduction) {
  if (BucketView(pieces).bytes() == 0) return "nothing";
  // One factor for all: the scales of the blocks carry it.
  const auto factor = static_cast<float>(reduction.prescale * reduction.postscale / reduction.divisor);
  if (const char* ran = world.int8_allreduce(pieces, factor)) return ran;
  Lent<Int8Allreduce>(world, world, rank, size, pieces)->run(factor);
  return "int8";
}

}  // namespace farandole
