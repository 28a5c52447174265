#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/link_exchange.h"

namespace farandole {

/// A bucket cut in one segment per rank; each rank reduces its own segment from what all ranks send it straight.
///
/// Every rank sends (N-1)/N of the bucket to reduce and as much again to gather, like a ring, but in two steps instead
/// of 2 (N-1), and the rank that combines has all the inputs at once: in rank order, 16 bit types in fp32 and rounded
/// once. So the result has the same bits as over shared memory and for any fusion of the same tensors. The price is N-1
/// streams at a time per rank. Chunks are reduced as soon as all ranks' have arrived, while others are on their way.
class SegmentReduce {
 public:
  /// `bounds[r]`, `bounds[r + 1]` are the ends of rank r's segment in bytes. With `mine` the own segment goes there
  /// (null is fine for an empty one) and nothing is gathered; else every rank gets the whole result in the outputs of
  /// the bucket.
  SegmentReduce(Mesh& mesh, const BucketView& bucket, std::span<const size_t> bounds, DType dtype,
                const Reduction& reduction, std::optional<std::byte*> mine);

  /// The same for who makes the inputs while this runs: `chunk_bytes` instead of a size of our own choice, and nothing
  /// is read before allow() says that it is there.
  SegmentReduce(Mesh& mesh, const BucketView& bucket, std::span<const size_t> bounds, DType dtype,
                const Reduction& reduction, size_t chunk_bytes);

  /// Blocks until this rank has sent and received all its part.
  void run();

  /// The first `chunks` chunks of all segments may be read from now on.
  void allow(size_t chunks) { allowed_ = chunks; }

  /// Moves what can be moved without waiting; returns whether anything did.
  [[nodiscard]] bool step();
  [[nodiscard]] bool done() const;

  /// Tells `waiter` what the next step needs.
  void want(LinkWaiter& waiter) const;

  /// So many chunks of every segment lie in the outputs, as far as the segments reach.
  [[nodiscard]] size_t gathered() const;

  /// The chunk for segments of at most `longest` bytes.
  [[nodiscard]] static size_t chunk_for(const Mesh& mesh, size_t longest);

 private:
  /// One direction of one link: a fixed interleaving of raw chunks to reduce and finished chunks to gather, which both
  /// ends derive alike.
  struct Stream {
    enum class Next { None, Raw, Finished };
    [[nodiscard]] Next next() const;
    void advance();

    size_t raw_chunks = 0, finished_chunks = 0;  // in all
    size_t raw = 0, finished = 0;                // done
    std::byte* staging = nullptr;
  };
  struct Lane {
    Stream send, receive;
    Outgoing out;
    Incoming in;
    std::byte* slots = nullptr;
  };
  struct Range {
    size_t offset, bytes;
  };

  [[nodiscard]] int peer_of(const Lane& lane) const { return lane.out.link->peer(); }
  [[nodiscard]] size_t chunks_of(int rank) const;
  [[nodiscard]] Range chunk(int rank, size_t number) const;
  [[nodiscard]] bool push(Lane& lane);
  [[nodiscard]] bool pull(Lane& lane);
  [[nodiscard]] bool load(Lane& lane);
  [[nodiscard]] bool make_room(Lane& lane);
  [[nodiscard]] bool reduce_arrived();
  void reduce_chunk(size_t number);
  void take_scratch();

  Mesh& mesh_;
  const BucketView& bucket_;
  std::span<const size_t> bounds_;
  DType dtype_;
  const Reduction& reduction_;
  std::optional<std::byte*> mine_;
  size_t chunk_bytes_;
  size_t allowed_ = std::numeric_limits<size_t>::max();  // chunks of each segment whose input is there
  size_t reduced_ = 0;                                   // chunks of the own segment
  std::vector<Lane> lanes_;
  std::vector<const void*> sources_;
};

}  // namespace farandole
