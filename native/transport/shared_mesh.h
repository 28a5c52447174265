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

/// A rank's view of its world's segment: counters of its own progress, and waits for the progress of others.
///
/// Every rank runs the same operations in the same order, so counters agree between ranks and are never reset.
class SharedMesh {
  static constexpr size_t kStreamed =
      4096;  // for fewer bytes, the fence after non-temporal stores costs more than they save

 public:
  /// `rank` counts the ranks of this host; `names[r]` is the number of rank r in errors.
  SharedMesh(std::shared_ptr<Segment> segment, int rank, std::vector<int> names, Guard& guard, WaitPolicy policy)
      : segment_(std::move(segment)), rank_(rank), names_(std::move(names)), guard_(guard), policy_(policy) {}

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return segment_->ranks(); }
  [[nodiscard]] size_t slot_bytes() const { return segment_->slot_bytes(); }

  /// The bytes of a slot that reductions use per owner: all of it, or the limit of use_of_slots(). Equal on all ranks.
  [[nodiscard]] size_t chunk_bytes() const { return std::min(chunk_bytes_, slot_bytes()); }
  void use_of_slots(size_t chunk_bytes) { chunk_bytes_ = chunk_bytes; }

  /// The slot that holds stripe `stripe` of `rank`.
  [[nodiscard]] std::byte* slot(int rank, uint32_t stripe) {
    return segment_->slot(rank, static_cast<int>(stripe % kStripes));
  }
  /// The part of that slot for rank `owner`.
  [[nodiscard]] std::byte* slot(int rank, uint32_t stripe, int owner) {
    return slot(rank, stripe) + static_cast<size_t>(owner) * slot_bytes();
  }

  /// Copies into a slot of this rank that others only read. Its lines are also in the others' caches. Where cores share
  /// no cache, taking a line back costs 26 ns; non-temporal stores cost an eighth of that.
  static void copy_to_slot(std::byte* slot, const std::byte* from, size_t bytes) {
    if (bytes >= kStreamed) stream_bytes(slot, from, bytes);
    else copy_bytes(slot, from, bytes);
  }

  /// Starts an operation on stripes and returns its first stripe. Waits until the previous operation has left the
  /// slots, unless both are pipelines, whose own order already guarantees that.
  uint32_t begin_stripes(bool pipeline);
  void end_stripes(uint32_t next_stripe);

  /// Announces that this rank's stripe is in the slots; waits for that of all ranks or of one.
  void arrive(uint32_t stripe) { segment_->area(rank_).arrived.publish(stripe + 1); }
  void await_arrived(uint32_t stripe) { await(&RankArea::arrived, stripe + 1); }
  void await_arrived(uint32_t stripe, int peer) { await_one(peer, &RankArea::arrived, stripe + 1); }

  /// Announces that this rank's result of `stripe` is in the slots, or that it has read its input; waits for all ranks.
  void finish(uint32_t stripe) { segment_->area(rank_).reduced.publish(stripe + 1); }
  void await_finished(uint32_t stripe) { await(&RankArea::reduced, stripe + 1); }

  /// The same without waiting. Throws `PeerLost` when a missing rank is lost.
  [[nodiscard]] bool have_arrived(uint32_t stripe) { return have(&RankArea::arrived, stripe + 1); }
  [[nodiscard]] bool have_finished(uint32_t stripe) { return have(&RankArea::reduced, stripe + 1); }

  /// Starts the next small operation. Its slots alternate by parity, so that no rank needs to acknowledge.
  uint32_t begin_small() { return ++small_; }
  [[nodiscard]] std::byte* small_slot(int rank, uint32_t number) {
    return segment_->small_slot(rank, static_cast<int>(number & 1));
  }
  void publish_small(uint32_t number) { segment_->area(rank_).small.publish(number); }
  void await_small(int peer, uint32_t number) { await_one(peer, &RankArea::small, number); }

  /// Announces whether all buffers of the next allreduce are in this rank's arena. Write their places to offers(rank())
  /// first. Returns the allreduce's number.
  uint32_t offer(bool mine);
  /// Returns whether all ranks announced so; their places may then be read. Only for a rank that did so itself: no
  /// other rank can finish this allreduce, and overwrite its announcement, before this rank takes part.
  [[nodiscard]] bool all_offer(uint32_t number);
  /// Announces that this rank has done its share of a direct allreduce; waits for all ranks.
  void finish_direct(uint32_t number);
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
  WaitPolicy policy_;
  size_t chunk_bytes_ = std::numeric_limits<size_t>::max();
  uint32_t stripes_ = 0;     // used so far
  uint32_t operations_ = 0;  // on stripes, so far
  uint32_t small_ = 0;
  uint32_t offered_ = 0;  // allreduces announced by offer()
  bool after_pipeline_ = true;
};

}  // namespace farandole
