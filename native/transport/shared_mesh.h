#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/reduce.h"
#include "transport/segment.h"
#include "transport/waiter.h"

namespace farandole {

/// A rank's view of the segment in which its whole world lives: counters of what it has done, waits for what others do.
///
/// Every rank runs the same operations in the same order, so the counters of all ranks tell the same story and need no
/// reset.
class SharedMesh {
  static constexpr size_t kStreamed = 4096;  // below, the wait for such stores to end is longer than what they save

 public:
  /// `rank` counts the ranks of this host; `names[r]` is what errors call rank r.
  SharedMesh(std::shared_ptr<Segment> segment, int rank, std::vector<int> names, Guard& guard, Patience patience)
      : segment_(std::move(segment)), rank_(rank), names_(std::move(names)), guard_(guard), patience_(patience) {}

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return segment_->ranks(); }
  [[nodiscard]] size_t slot_bytes() const { return segment_->slot_bytes(); }

  /// What reductions use of a slot for one owner: all of it, unless use_of_slots() has said less. The same on all
  /// ranks.
  [[nodiscard]] size_t chunk_bytes() const { return std::min(chunk_bytes_, slot_bytes()); }
  void use_of_slots(size_t chunk_bytes) { chunk_bytes_ = chunk_bytes; }

  /// The slot in which `rank` holds its stripe number `stripe`.
  [[nodiscard]] std::byte* slot(int rank, uint32_t stripe) {
    return segment_->slot(rank, static_cast<int>(stripe % kStripes));
  }
  /// The part of that slot that belongs to rank `owner`.
  [[nodiscard]] std::byte* slot(int rank, uint32_t stripe, int owner) {
    return slot(rank, stripe) + static_cast<size_t>(owner) * slot_bytes();
  }

  /// Copies into a slot of this rank that others only read. Its lines are this core's, and in the others' caches too:
  /// where the cores share no cache, taking each back costs 26 ns, and going past the caches an eighth of that.
  static void lay_out(std::byte* slot, const std::byte* from, size_t bytes) {
    if (bytes >= kStreamed) stream_bytes(slot, from, bytes);
    else copy_bytes(slot, from, bytes);
  }

  /// Starts an operation on stripes; returns the number of its first stripe. Waits until the operation before has left
  /// the slots, unless both are pipelines whose own order already guarantees that.
  uint32_t begin_stripes(bool pipeline);
  void end_stripes(uint32_t next_stripe);

  /// Stripe `stripe` of this rank is in the slots / all ranks' are.
  void arrive(uint32_t stripe) { segment_->area(rank_).arrived.publish(stripe + 1); }
  void await_arrived(uint32_t stripe) { await(&RankArea::arrived, stripe + 1); }
  void await_arrived(uint32_t stripe, int peer) { await_one(peer, &RankArea::arrived, stripe + 1); }

  /// This rank's result of `stripe` is in the slots, or it has read what it needs / all ranks' are.
  void finish(uint32_t stripe) { segment_->area(rank_).reduced.publish(stripe + 1); }
  void await_finished(uint32_t stripe) { await(&RankArea::reduced, stripe + 1); }

  /// The same for who has something else to do meanwhile. False throws `PeerLost` when it will stay so.
  [[nodiscard]] bool have_arrived(uint32_t stripe) { return have(&RankArea::arrived, stripe + 1); }
  [[nodiscard]] bool have_finished(uint32_t stripe) { return have(&RankArea::reduced, stripe + 1); }

  /// The next small operation: its parity slots alternate, so that nobody need acknowledge.
  uint32_t begin_small() { return ++small_; }
  [[nodiscard]] std::byte* small_slot(int rank, uint32_t number) {
    return segment_->small_slot(rank, static_cast<int>(number & 1));
  }
  void publish_small(uint32_t number) { segment_->area(rank_).small.publish(number); }
  void await_small(int peer, uint32_t number) { await_one(peer, &RankArea::small, number); }

  /// Tells the others of the next allreduce whether all its buffers lie in this rank's arena; their places must be in
  /// offers(rank()) before. Returns its number.
  uint32_t offer(bool mine);
  /// True when all ranks said so, and then their places may be read. Only for a rank that said so itself: nobody gets
  /// past this allreduce without it, so nobody has told of the next yet.
  [[nodiscard]] bool all_offer(uint32_t number);
  /// This rank has done its share between the arenas; returns when all have.
  void settle(uint32_t number);
  [[nodiscard]] uint64_t* offers(int rank) { return segment_->offers(rank); }
  [[nodiscard]] std::byte* arena_if_mapped(int rank) { return segment_->arena_if_mapped(rank); }

 private:
  void await(Signal RankArea::* signal, uint32_t target) {
    for (int peer = 0; peer < size(); ++peer) await_one(peer, signal, target);
  }
  void await_one(int peer, Signal RankArea::* signal, uint32_t target);
  bool have(Signal RankArea::* signal, uint32_t target);

  std::shared_ptr<Segment> segment_;
  int rank_;
  std::vector<int> names_;
  Guard& guard_;
  Patience patience_;
  size_t chunk_bytes_ = std::numeric_limits<size_t>::max();
  uint32_t stripes_ = 0;     // used so far
  uint32_t operations_ = 0;  // on stripes, so far
  uint32_t small_ = 0;
  uint32_t offered_ = 0;  // allreduces that told of their buffers' places
  bool after_pipeline_ = true;
};

}  // namespace farandole
