#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "transport/futex.h"
#include "transport/lane.h"
#include "transport/life.h"
#include "transport/ring.h"

namespace farandole {

/// Stripes in flight per rank in the shared slots. With three or more, a slot is reused only after every reader has
/// shown, by arriving at a later stripe, that it is done with it (see shm_allreduce.cc); the fourth is slack.
inline constexpr int kStripes = 4;

/// Messages up to this size go through the small slots in one step.
inline constexpr size_t kSmallBytes = 4096;

/// How many buffers of a bucket a rank can offer to the others (see shm_direct.h).
inline constexpr size_t kMostOffers = 511;

/// What each rank owns in the segment. Written by its owner, read by its peers, one cache-line pair per concern.
struct RankArea {
  Life life;
  Signal doorbell;  // somebody has something for this rank's driver
  Signal arrived;   // stripes whose input lies in the slots
  Signal reduced;   // stripes whose result lies in the slots, or whose input was read
  Signal finished;  // operations that this rank has left
  Signal small;     // small operations whose payload lies in the small slots
  Signal offered;   // twice the number of an allreduce, and one more if all its buffers lie in this rank's arena
  Signal settled;   // allreduces between arenas in which this rank has done its share
};

/// Why a job ended before its time, as told by the first rank that knew.
struct Abort {
  enum class Reason : uint32_t { Died = 1, Left = 2, Unreachable = 3, Failed = 4, Silent = 5, Cut = 6, Late = 7 };
  int rank;
  Reason reason;
};

/// The memory that the ranks of one host share: signals, life words, slots for the collectives, and byte rings.
///
/// It is a memfd, so nothing is left behind however the ranks die. The first rank creates it and hands the descriptor
/// to the others over an authenticated Unix socket; ranks that are threads of one process share the object itself.
class Segment {
 public:
  /// `slot_bytes` is the wished chunk per rank and stripe; it shrinks when many ranks would need too much memory.
  /// With `pair_rings` every pair of ranks gets a byte ring in each direction (for worlds of several hosts).
  /// Throws std::system_error when the system refuses the memory.
  static std::shared_ptr<Segment> create(int ranks, size_t slot_bytes, bool pair_rings);

  /// Maps a segment made by another process; `fd` stays the caller's. Throws `Error` when it is none of ours.
  static std::shared_ptr<Segment> attach(int fd);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] int ranks() const;
  [[nodiscard]] size_t slot_bytes() const;
  [[nodiscard]] bool has_pair_rings() const;

  [[nodiscard]] RankArea& area(int rank);
  /// The slot of `rank` for its stripe `index` (0 <= index < kStripes): ranks() * slot_bytes() bytes.
  [[nodiscard]] std::byte* slot(int rank, int index);
  /// The small slot of `rank` with the given parity: kSmallBytes bytes.
  [[nodiscard]] std::byte* small_slot(int rank, int parity);
  /// Where `rank` offers its buffers: kMostOffers offsets in its arena.
  [[nodiscard]] uint64_t* offers(int rank);

  /// Room for the registered buffers of `rank`, kArenaBytes of it; only what is written takes memory. Mapped when first
  /// asked for. Throws Error: Invalid when files may not be that large, Internal when the address space is too small.
  [[nodiscard]] std::byte* arena(int rank);
  /// The same, or null as long as this process has asked for none.
  [[nodiscard]] std::byte* arena_if_mapped(int rank);
  /// Gives the memory of a part of an arena back to the system; it reads as zeros then.
  void forget(int rank, size_t offset, size_t bytes);
  static constexpr size_t kArenaBytes = size_t{4} << 30;

  [[nodiscard]] LaneRounds& lane();
  /// What `rank` brings along into a round of the lane: kSmallBytes bytes.
  [[nodiscard]] std::byte* lane_slot(int rank, uint32_t round);
  [[nodiscard]] Ring& control_ring(int from, int to);
  [[nodiscard]] Ring& pair_ring(int from, int to);

  /// Ends the job for every rank of the host; the first call counts. Wakes all.
  void abort(Abort why);
  [[nodiscard]] std::optional<Abort> aborted() const;

 private:
  struct Header;
  Segment(int fd, std::byte* base, size_t bytes);
  Header& header() const;

  int fd_;
  std::byte* base_;
  size_t bytes_;  // mapped at base_
  std::mutex mapping_;
  std::atomic<std::byte*> arenas_{nullptr};
};

}  // namespace farandole
