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

/// An allreduce of a bucket with one segment per rank: all ranks send each segment directly to its rank, which reduces
/// it.
///
/// Every rank sends (N-1)/N of the bucket to reduce and as much to gather, like a ring, but in two steps instead of 2
/// (N-1). The reducing rank has all inputs at once, so it combines them in rank order, 16-bit types in fp32 with one
/// rounding. The result has therefore the same bits as over shared memory, and for any fusion of the same tensors. The
/// price is N-1 concurrent streams per rank. A chunk is reduced once it has arrived from all ranks, while others are in
/// flight.
class SegmentReduce {
 public:
  /// Rank r's segment is the bytes from `bounds[r]` to `bounds[r + 1]`. With `mine`, this rank's segment goes there
  /// (null is allowed for an empty one) and nothing is gathered. Otherwise every rank gets the whole result in the
  /// outputs of the bucket.
  SegmentReduce(Mesh& mesh, const BucketView& bucket, std::span<const size_t> bounds, DType dtype,
                const Reduction& reduction, std::optional<std::byte*> mine);

  /// The same for inputs that are produced while this runs. The chunk size is `chunk_bytes`, and input is read only
  /// after allow() has released it.
  SegmentReduce(Mesh& mesh, const BucketView& bucket, std::span<const size_t> bounds, DType dtype,
                const Reduction& reduction, size_t chunk_bytes);

  /// Blocks until this rank has sent and received its whole part.
  void run();

  /// Releases the first `chunks` chunks of all segments for reading.
  void allow(size_t chunks) { allowed_ = chunks; }

  /// Moves what it can without waiting; returns whether anything moved.
  [[nodiscard]] bool step();
  [[nodiscard]] bool done() const;

  /// Adds what the next step needs to `waiter`.
  void want(LinkWaiter& waiter) const;

  /// The number of chunks of every segment that are complete in the outputs.
  [[nodiscard]] size_t gathered() const;

  /// The chunk for segments of at most `longest` bytes.
  [[nodiscard]] static size_t chunk_for(const Mesh& mesh, size_t longest);

 private:
  /// One direction of one link: a fixed interleaving of raw chunks to reduce and finished chunks to gather. Both ends
  /// compute the same order.
  struct Stream {
    enum class Next { None, Raw, Finished };
    [[nodiscard]] Next next() const;
    void advance();

    size_t raw_chunks = 0, finished_chunks = 0;  // in total
    size_t raw = 0, finished = 0;                // done
    std::byte* staging = nullptr;
  };
  struct PeerStreams {
    Stream send, receive;
    Outgoing out;
    Incoming in;
    std::byte* slots = nullptr;
  };
  struct Range {
    size_t offset, bytes;
  };

  [[nodiscard]] int peer_of(const PeerStreams& streams) const { return streams.out.link->peer(); }
  [[nodiscard]] size_t chunks_of(int rank) const;
  [[nodiscard]] Range chunk(int rank, size_t number) const;
  [[nodiscard]] bool push(PeerStreams& streams);
  [[nodiscard]] bool pull(PeerStreams& streams);
  [[nodiscard]] bool load(PeerStreams& streams);
  [[nodiscard]] bool make_room(PeerStreams& streams);
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
  size_t allowed_ = std::numeric_limits<size_t>::max();  // chunks of each segment whose input may be read
  size_t reduced_ = 0;                                   // chunks of this rank's segment
  std::vector<PeerStreams> peers_;
  std::vector<const void*> sources_;
};

}  // namespace farandole
