#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/link_exchange.h"

namespace farandole {

/// The data of a `SegmentReduce`, counted in units: how runs of units are sent, combined and received.
class SegmentData {
 public:
  /// `count` units from `begin`.
  struct Run {
    size_t begin, count;
  };

  SegmentData() = default;
  virtual ~SegmentData() = default;
  SegmentData(const SegmentData&) = delete;
  SegmentData& operator=(const SegmentData&) = delete;

  /// The bytes of a run in messages, and the most that one unit can have there.
  [[nodiscard]] virtual size_t bytes(Run run) const = 0;
  [[nodiscard]] virtual size_t unit_bytes() const = 0;

  // `staging` has room for the bytes of the run. A result that is not in `staging` stays valid until the run is sent.

  /// Returns this rank's input, in the form of messages.
  [[nodiscard]] virtual const std::byte* input(Run run, std::byte* staging) = 0;
  /// Returns the result of a run that reduce() has made.
  [[nodiscard]] virtual const std::byte* result(Run run, std::byte* staging) = 0;
  /// Returns where to receive another rank's result, and stores it once it has arrived there.
  [[nodiscard]] virtual std::byte* place(Run run, std::byte* staging) = 0;
  virtual void store(Run run, const std::byte* arrived, const std::byte* staging) = 0;
  /// Combines the inputs of all ranks. `inputs[r]` is that of rank r; the entry of this rank, `mine`, is free.
  virtual void reduce(Run run, std::span<const std::byte*> inputs, size_t mine) = 0;
};

/// The bytes of a bucket; the unit is a byte. With `mine`, this rank's segment, which begins at byte `mine_begin`, goes
/// there instead of to the bucket's outputs.
class BucketData final : public SegmentData {
 public:
  BucketData(const BucketView& bucket, DType dtype, const Reduction& reduction, std::byte* mine = nullptr,
             size_t mine_begin = 0)
      : bucket_(bucket), dtype_(dtype), reduction_(reduction), mine_(mine), mine_begin_(mine_begin) {}

  [[nodiscard]] size_t bytes(Run run) const override { return run.count; }
  [[nodiscard]] size_t unit_bytes() const override { return 1; }
  [[nodiscard]] const std::byte* input(Run run, std::byte* staging) override {
    return input_run(bucket_, run.begin, run.count, staging);
  }
  [[nodiscard]] const std::byte* result(Run run, std::byte* staging) override {
    return output_run(bucket_, run.begin, run.count, staging);
  }
  [[nodiscard]] std::byte* place(Run run, std::byte* staging) override {
    return output_place(bucket_, run.begin, run.count, staging);
  }
  void store(Run run, const std::byte* arrived, const std::byte* staging) override {
    write_output(bucket_, run.begin, run.count, arrived, staging);
  }
  void reduce(Run run, std::span<const std::byte*> inputs, size_t mine) override;

 private:
  const BucketView& bucket_;
  DType dtype_;
  const Reduction& reduction_;
  std::byte* mine_;
  size_t mine_begin_;
  std::vector<const void*> sources_;
};

/// An allreduce with one segment per rank: all ranks send each segment directly to its rank, which reduces it.
///
/// Every rank sends (N-1)/N of the data to reduce and as much to gather, like a ring, but in two steps instead of 2
/// (N-1). The reducing rank has all inputs at once, so it combines them in rank order, 16-bit types in fp32 with one
/// rounding. The result has therefore the same bits as over shared memory, and for any fusion of the same tensors. The
/// price is N-1 concurrent streams per rank. A chunk is reduced once it has arrived from all ranks, while others are in
/// flight.
class SegmentReduce {
 public:
  /// Rank r's segment is the units from `bounds[r]` to `bounds[r + 1]`. Without `gathers`, each rank gets the result of
  /// its own segment only.
  SegmentReduce(Mesh& mesh, SegmentData& data, std::span<const size_t> bounds, size_t chunk_units, bool gathers = true);

  /// Blocks until this rank has sent and received its whole part.
  void run();

  /// For inputs that are produced while this runs: releases the first `chunks` chunks of all segments for reading. All
  /// are released at first.
  void allow(size_t chunks) { allowed_ = chunks; }

  /// Moves what it can without waiting; returns whether anything moved.
  [[nodiscard]] bool step();
  [[nodiscard]] bool done() const;

  /// Adds what the next step needs to `waiter`.
  void want(LinkWaiter& waiter) const;

  /// The number of chunks of every segment that are complete in the outputs.
  [[nodiscard]] size_t gathered() const;

  /// The chunk for segments of at most `longest` bytes, and for those of `bounds`.
  [[nodiscard]] static size_t chunk_for(const Mesh& mesh, size_t longest);
  [[nodiscard]] static size_t chunk_for(const Mesh& mesh, std::span<const size_t> bounds);

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

  [[nodiscard]] int peer_of(const PeerStreams& streams) const { return streams.out.link->peer(); }
  [[nodiscard]] size_t chunks_of(int rank) const;
  [[nodiscard]] SegmentData::Run chunk(int rank, size_t number) const;
  [[nodiscard]] bool push(PeerStreams& streams);
  [[nodiscard]] bool pull(PeerStreams& streams);
  [[nodiscard]] bool load(PeerStreams& streams);
  [[nodiscard]] bool make_room(PeerStreams& streams);
  [[nodiscard]] bool reduce_arrived();
  void reduce_chunk(size_t number);
  void take_scratch();

  Mesh& mesh_;
  SegmentData& data_;
  std::span<const size_t> bounds_;
  size_t chunk_units_;
  size_t chunk_bytes_;  // the most bytes of a chunk
  bool gathers_;
  size_t allowed_ = std::numeric_limits<size_t>::max();  // chunks of each segment whose input may be read
  size_t reduced_ = 0;                                   // chunks of this rank's segment
  std::vector<PeerStreams> peers_;
  std::vector<const std::byte*> inputs_;
};

}  // namespace farandole
