#include <algorithm>
#include <memory>
#include <vector>

#include "collectives/block_view.h"
#include "collectives/link_collectives.h"
#include "collectives/link_segments.h"

namespace farandole {
namespace {

/// A bucket that travels as blocks; the unit is a block. Inputs are quantised when they are sent, and results
/// dequantised when they arrive, while the kernel sends and receives other chunks.
class BlockData final : public SegmentData {
 public:
  /// This rank's segment begins at block `begin` and ends before `end`.
  BlockData(const BlockView& blocks, size_t begin, size_t end, float factor)
      : blocks_(blocks),
        begin_(blocks.byte_of(begin)),
        factor_(factor),
        sums_(std::make_unique_for_overwrite<std::byte[]>(blocks.byte_of(end) - begin_)) {}

  [[nodiscard]] size_t bytes(Run run) const override {
    return blocks_.byte_of(run.begin + run.count) - blocks_.byte_of(run.begin);
  }
  [[nodiscard]] size_t unit_bytes() const override { return int8_bytes(kInt8Block); }
  [[nodiscard]] const std::byte* input(Run run, std::byte* staging) override {
    blocks_.for_each(run.begin, run.begin + run.count,
                     [&](const Piece& values, size_t done) { quantise(inputs_of(values), staging + done); });
    return staging;
  }
  [[nodiscard]] const std::byte* result(Run run, std::byte*) override { return sum_of(run); }
  [[nodiscard]] std::byte* place(Run, std::byte* staging) override { return staging; }
  void store(Run run, const std::byte* arrived, const std::byte*) override {
    blocks_.for_each(run.begin, run.begin + run.count,
                     [&](const Piece& values, size_t done) { dequantise(arrived + done, outputs_of(values)); });
  }
  void reduce(Run run, std::span<const std::byte*> inputs, size_t mine) override {
    // The sums replace this rank's own blocks.
    std::byte* to = sum_of(run);
    inputs[mine] = input(run, to);
    sources_.resize(inputs.size());
    blocks_.for_each(run.begin, run.begin + run.count, [&](const Piece& values, size_t done) {
      std::ranges::transform(inputs, sources_.begin(), [done](const std::byte* each) { return each + done; });
      sum_runs(sources_, values.bytes / sizeof(float), factor_, to + done);
    });
    store(run, to, to);
  }

 private:
  [[nodiscard]] std::byte* sum_of(Run run) { return sums_.get() + (blocks_.byte_of(run.begin) - begin_); }

  const BlockView& blocks_;
  size_t begin_;
  float factor_;
  std::unique_ptr<std::byte[]> sums_;  // the blocks of this rank's segment
  std::vector<const std::byte*> sources_;
};

}  // namespace

const char* link_int8_allreduce(Mesh& mesh, std::span<const Piece> pieces, float factor) {
  const BlockView blocks(pieces);
  const auto n = static_cast<size_t>(mesh.size());
  std::vector<size_t> bounds(n + 1);
  for (size_t rank = 0; rank <= n; ++rank) bounds[rank] = blocks.first_block(rank, n);
  const auto mine = static_cast<size_t>(mesh.rank());
  BlockData data(blocks, bounds[mine], bounds[mine + 1], factor);
  // As many chunks as float32 has: with fewer, the first and the last chunk take a larger part of the time.
  constexpr size_t kBytes = kInt8Block * sizeof(float);
  const size_t longest = (blocks.blocks() + n - 1) / n * kBytes;
  SegmentReduce(mesh, data, bounds, std::max<size_t>(SegmentReduce::chunk_for(mesh, longest) / kBytes, 1)).run();
  return "int8 over links";
}

}  // namespace farandole
