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
/// arrived at a later stripe, which shows that it has read the slot (see shm_allreduce.cc). The fourth is slack.
inline constexpr int kStripes = 4;

/// Messages up to this size go through the small slots in one step.
inline constexpr size_t kSmallBytes = 4096;

/// The most buffers of a bucket that a rank can offer to the others (see shm_direct.h).
inline constexpr size_t kMostOffers = 511;

/// The signals of one rank in the segment, one cache-line pair each. The owner writes them, peers read them.
struct RankArea {
  Life life;
  Signal doorbell;     // rings when this rank's driver should check for messages
  Signal arrived;      // stripes whose input is in the slots
  Signal reduced;      // stripes whose result is in the slots, or whose input was read
  Signal finished;     // operations that this rank has left
  Signal small;        // small operations whose payload is in the small slots
  Signal offered;      // twice the number of an allreduce, plus one if all its buffers are in this rank's arena
  Signal direct_done;  // direct allreduces in which this rank has done its share
  /// The number of operations that this rank had run, plus one, when it last had requests for the coordinator.
  alignas(128) std::atomic<uint32_t> asked{0};
};

/// Why a job ended early, as reported by the first rank that noticed.
struct Abort {
  /// Overdue: an operation was not over in time, and no rank is known to be the cause.
  enum class Reason : uint32_t { Died = 1, Left, Unreachable, Failed, Silent, Cut, Late, Overdue };
  int rank;
  Reason reason;
};

/// The memory that the ranks of one host share: signals, life words, slots for the collectives, and byte rings.
///
/// It is a memfd, so nothing remains however the ranks die. The first rank creates it and passes the descriptor to the
/// others over an authenticated Unix socket. Ranks that are threads of one process share the object.
class Segment {
 public:
  /// `slot_bytes` is the requested chunk per rank and stripe; it shrinks when many ranks would need too much memory.
  /// With `pair_rings` every pair of ranks gets a byte ring in each direction (for worlds of several hosts), with
  /// `transfer_rings` another one for messages between two ranks.
  /// Throws std::system_error when the system refuses the memory.
  static std::shared_ptr<Segment> create(int ranks, size_t slot_bytes, bool pair_rings, bool transfer_rings = false);

  /// Maps a segment made by another process; the caller still owns `fd`. Throws `Error` when it is not a segment.
  static std::shared_ptr<Segment> attach(int fd);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] int ranks() const;
  [[nodiscard]] size_t slot_bytes() const;
  [[nodiscard]] bool has_pair_rings() const;
  [[nodiscard]] bool has_transfer_rings() const;

  [[nodiscard]] RankArea& area(int rank);
  /// The slot of `rank` for its stripe `index` (0 <= index < kStripes): ranks() * slot_bytes() bytes.
  [[nodiscard]] std::byte* slot(int rank, int index);
  /// The small slot of `rank` with the given parity: kSmallBytes bytes.
  [[nodiscard]] std::byte* small_slot(int rank, int parity);
  /// The place where `rank` offers its buffers: kMostOffers offsets in its arena.
  [[nodiscard]] uint64_t* offers(int rank);

  /// Address space for the registered buffers of `rank`: kArenaBytes, which use memory only once written. Mapped on
  /// first use. Throws Error (Invalid) when files may not be that large, or the address space is limited.
  [[nodiscard]] std::byte* arena(int rank);
  /// The arena, or null if this process has not mapped it.
  [[nodiscard]] std::byte* arena_if_mapped(int rank);
  /// Returns the memory of a part of an arena to the system; it reads as zeros afterwards.
  void release(int rank, size_t offset, size_t bytes);
  static constexpr size_t kArenaBytes = size_t{4} << 30;

  [[nodiscard]] LaneRounds& lane();
  /// The place for the data that `rank` contributes to a round of the lane: kSmallBytes bytes.
  [[nodiscard]] std::byte* lane_slot(int rank, uint32_t round);
  [[nodiscard]] Ring& control_ring(int from, int to);
  [[nodiscard]] Ring& pair_ring(int from, int to);
  [[nodiscard]] Ring& transfer_ring(int from, int to);

  /// Ends the job for every rank of the host and wakes them all. Only the first call counts.
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
