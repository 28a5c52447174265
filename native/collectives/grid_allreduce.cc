#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"
#include "collectives/link_segments.h"
#include "collectives/shm_collectives.h"

namespace farandole {
namespace {

// Bytes per rank and step if each rank combines all inputs itself.
constexpr size_t kWholeBytes = 256 << 10;

// For fewer bytes per host in a slot, copying costs more than the pipeline gains.
constexpr size_t kLeastRun = 1 << 10;

std::vector<Piece> in_place(std::span<const Piece> pieces) {
  std::vector<Piece> same(pieces.begin(), pieces.end());
  for (Piece& piece : same) piece.in = piece.out;
  return same;
}

/// The large allreduce. The bucket has L shards, one per local rank. A shard has H segments, one per host. A stripe is
/// one run of every segment.
///
/// In the host, a stripe takes two visits to the slots: one to reduce this rank's shard over the host, and one to share
/// it with the others after the column has reduced it over the hosts. All ranks of a host make the visits in the same
/// order: the second visit of a stripe follows `lead_` first visits after its own first one. So `lead_` stripes are on
/// the network. A rank never blocks in a visit: it moves bytes of its column whenever it can, because ranks of other
/// hosts wait for them. (No cycle of waits is possible: stripe k goes on the network only after second visits of
/// stripes below k - lead_ + 1, and `SegmentReduce` sends their data before chunks that are two chunks later.)
class Pipeline {
 public:
  Pipeline(GridMesh& mesh, std::span<const Piece> pieces, DType dtype, const TwoLevels& levels)
      : mesh_(mesh),
        shared_(mesh.shared()),
        pieces_(in_place(pieces)),
        input_(pieces),
        output_(pieces_),
        dtype_(dtype),
        levels_(levels),
        segment_(whole_lines((input_.bytes() + parts() - 1) / parts())),
        run_(std::min(shared_.chunk_bytes() / mesh.hosts() / 64 * 64, segment_)),
        stripes_(static_cast<uint32_t>((segment_ + run_ - 1) / run_)),
        per_chunk_(
            static_cast<uint32_t>(std::max<size_t>(1, SegmentReduce::chunk_for(mesh.column(), segment_) / run_))),
        lead_(std::min(stripes_, kLeadChunks * per_chunk_)),
        bounds_(bounds()),
        data_(output_, dtype, levels_.across),
        column_(mesh.column(), data_, bounds_, run_ * per_chunk_),
        sources_(mesh.locals()) {
    column_.allow(0);
  }

  void run() {
    first_ = shared_.begin_stripes(false);
    LinkWaiter waiter(mesh_.column());
    while (taken_ < 2 * stripes_ || !column_.done()) {
      bool moved = column_.step();
      moved |= take();
      moved |= put();
      if (moved) {
        waiter.moved();
        continue;
      }
      column_.want(waiter);
      // Watch the host's memory too, unless only the network is left.
      if (put_ != taken_ || waits_for_slot_) waiter.want_memory();
      waiter.pause();
    }
    shared_.end_stripes(first_ + 2 * stripes_);
  }

 private:
  static constexpr uint32_t kLeadChunks = 3;
  struct Range {
    size_t offset, bytes;
  };
  struct Visit {
    bool reduces;  // else it shares the result
    uint32_t stripe;
  };

  [[nodiscard]] size_t parts() const { return mesh_.hosts() * mesh_.locals(); }

  [[nodiscard]] size_t start_of(int local, int host) const {
    const size_t part = static_cast<size_t>(local) * mesh_.hosts() + static_cast<size_t>(host);
    return std::min(part * segment_, input_.bytes());
  }

  [[nodiscard]] std::vector<size_t> bounds() const {
    std::vector<size_t> bounds;
    for (int host = 0; host <= mesh_.grid().hosts; ++host) bounds.push_back(start_of(mesh_.grid().local, host));
    return bounds;
  }

  [[nodiscard]] Range range(uint32_t stripe, int local, int host) const {
    const size_t start = start_of(local, host);
    const size_t end = std::min(start + segment_, input_.bytes());
    const size_t offset = std::min(start + stripe * run_, end);
    return {offset, std::min(run_, end - offset)};
  }

  [[nodiscard]] Visit visit(uint32_t number) const {
    if (number < lead_) return {true, number};
    const uint32_t later = number - lead_;
    const uint32_t in_turns = 2 * (stripes_ - lead_);
    if (later >= in_turns) return {false, later - (stripes_ - lead_)};
    return later % 2 == 0 ? Visit{false, later / 2} : Visit{true, lead_ + later / 2};
  }

  /// The place of a run of `owner`'s shard in the slot of `local`.
  [[nodiscard]] std::byte* slot(int local, uint32_t number, int owner, int host) {
    return shared_.slot(local, first_ + number, owner) + static_cast<size_t>(host) * run_;
  }

  bool put() {
    waits_for_slot_ = false;
    if (put_ == 2 * stripes_) return false;
    const Visit next = visit(put_);
    if (!next.reduces && column_.gathered() * uint64_t{per_chunk_} <= next.stripe && !gathered_all()) return false;
    waits_for_slot_ = put_ >= kStripes && !shared_.have_finished(first_ + put_ - kStripes);
    if (waits_for_slot_) return false;
    for (int local = 0; local < shared_.size(); ++local) {
      // Reduce all other ranks' shards; share this rank's own.
      if (next.reduces == (local == shared_.rank())) continue;
      for (int host = 0; host < mesh_.grid().hosts; ++host) {
        const Range from = range(next.stripe, local, host);
        std::byte* to = slot(shared_.rank(), put_, local, host);
        (next.reduces ? input_ : output_).for_each(from.offset, from.bytes, [&](const Piece& part, size_t done) {
          std::memcpy(to + done, part.in, part.bytes);
        });
      }
    }
    shared_.arrive(first_ + put_++);
    return true;
  }

  [[nodiscard]] bool gathered_all() const { return column_.gathered() == std::numeric_limits<size_t>::max(); }

  bool take() {
    if (taken_ == put_ || !shared_.have_arrived(first_ + taken_)) return false;
    const Visit next = visit(taken_);
    for (int host = 0; host < mesh_.grid().hosts; ++host) {
      if (next.reduces) reduce_run(next.stripe, host);
      else copy_runs(next.stripe, host);
    }
    shared_.finish(first_ + taken_++);
    if (next.reduces) {
      const uint32_t ready = next.stripe + 1;
      column_.allow(ready == stripes_ ? std::numeric_limits<size_t>::max() : ready / per_chunk_);
    }
    return true;
  }

  void reduce_run(uint32_t stripe, int host) {
    const int me = shared_.rank();
    const Range own = range(stripe, me, host);
    input_.for_each(own.offset, own.bytes, [&](const Piece& part, size_t done) {
      for (int local = 0; local < shared_.size(); ++local)
        sources_[static_cast<size_t>(local)] = local == me ? part.in : slot(local, taken_, me, host) + done;
      reduce(dtype_, levels_.within, part.out, sources_, part.bytes / size_of(dtype_));
    });
  }

  void copy_runs(uint32_t stripe, int host) {
    for (int local = 0; local < shared_.size(); ++local) {
      if (local == shared_.rank()) continue;
      const Range to = range(stripe, local, host);
      const std::byte* from = slot(local, taken_, local, host);
      output_.for_each(to.offset, to.bytes,
                       [&](const Piece& part, size_t done) { std::memcpy(part.out, from + done, part.bytes); });
    }
  }

  GridMesh& mesh_;
  SharedMesh& shared_;
  std::vector<Piece> pieces_;
  BucketView input_;
  BucketView output_;  // its inputs are its outputs
  DType dtype_;
  const TwoLevels& levels_;
  size_t segment_;      // bytes
  size_t run_;          // of a segment in one stripe
  uint32_t stripes_;    // in all
  uint32_t per_chunk_;  // stripes in a chunk of the network's
  uint32_t lead_;
  std::vector<size_t> bounds_;
  BucketData data_;
  SegmentReduce column_;
  std::vector<const void*> sources_;
  uint32_t first_ = 0;
  uint32_t put_ = 0, taken_ = 0;  // visits
  bool waits_for_slot_ = false;
};

void in_two_hops(GridMesh& mesh, std::span<const Piece> pieces, DType dtype, const TwoLevels& levels) {
  shm_allreduce(mesh.shared(), pieces, dtype, levels.within);
  link_allreduce(mesh.column(), in_place(pieces), dtype, levels.across);
}

void in_three_steps(GridMesh& mesh, const BucketView& bucket, DType dtype, const TwoLevels& levels) {
  const size_t bytes = bucket.bytes();
  const size_t shard = whole_lines((bytes + mesh.locals() - 1) / mesh.locals());
  std::byte* staging = mesh.scratch(bytes + shard);
  std::byte* mine = staging + bytes;
  std::vector<size_t> sizes(mesh.locals());
  for (size_t local = 0; local < mesh.locals(); ++local)
    sizes[local] = std::min((local + 1) * shard, bytes) - std::min(local * shard, bytes);
  std::vector<size_t> counts = sizes;
  for (size_t& count : counts) count /= size_of(dtype);
  shm_reducescatter(mesh.shared(), input_run(bucket, 0, bytes, staging), mine, counts, dtype, levels.within);
  const Piece piece{mine, mine, sizes[static_cast<size_t>(mesh.grid().local)]};
  link_allreduce(mesh.column(), {&piece, 1}, dtype, levels.across);
  std::byte* whole = output_place(bucket, 0, bytes, staging);
  std::vector<std::byte*> out(mesh.locals());
  for (size_t local = 0; local < mesh.locals(); ++local) out[local] = whole + std::min(local * shard, bytes);
  shm_allgather(mesh.shared(), mine, out, sizes);
  write_output(bucket, 0, bytes, whole, staging);
}

void from_all_inputs(GridMesh& mesh, const BucketView& bucket, DType dtype, const Reduction& reduction) {
  const size_t ranks = mesh.grid().ranks.size();
  const size_t step = std::min(kWholeBytes, bucket.bytes());
  std::vector<std::byte> rows(ranks * step);  // the allgather uses the mesh's scratch memory
  const auto own = static_cast<size_t>(mesh.grid().rank_at(mesh.grid().host, mesh.grid().local));
  std::vector<std::byte*> out(ranks);
  std::vector<const void*> sources(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) out[rank] = rows.data() + rank * step;
  for (size_t at = 0; at < bucket.bytes(); at += step) {
    const size_t bytes = std::min(step, bucket.bytes() - at);
    const std::byte* mine = input_run(bucket, at, bytes, out[own]);
    grid_allgather(mesh, mine, out, std::vector<size_t>(ranks, bytes));
    bucket.for_each(at, bytes, [&](const Piece& part, size_t done) {
      for (size_t rank = 0; rank < ranks; ++rank) sources[rank] = out[rank] + done;
      reduce(dtype, reduction, part.out, sources, part.bytes / size_of(dtype));
    });
  }
}

}  // namespace

const char* grid_allreduce(GridMesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction) {
  const BucketView bucket(pieces);
  if (bucket.bytes() == 0) return "nothing";
  const auto levels = two_levels(mesh.grid(), dtype, reduction);
  if (!levels) {
    from_all_inputs(mesh, bucket, dtype, reduction);
    return "grid, all inputs";
  }
  // Within one host, one hop with more bytes is faster than two with fewer.
  if (bucket.bytes() * mesh.locals() * (mesh.hosts() - 1) <= mesh.column().small_bytes()) {
    in_two_hops(mesh, pieces, dtype, *levels);
    return "grid in two hops";
  }
  if (mesh.shared().chunk_bytes() / mesh.hosts() < kLeastRun) {
    in_three_steps(mesh, bucket, dtype, *levels);
    return "grid in three steps";
  }
  Pipeline(mesh, pieces, dtype, *levels).run();
  return "grid pipeline";
}

}  // namespace farandole
