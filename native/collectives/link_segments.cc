#include "collectives/link_segments.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kSmallestChunk = 16 << 10;
constexpr size_t kArrivedBytes = 1 << 20;  // of one chunk from every peer, together

// The number of raw chunks by which a stream leads its finished ones: enough for the peer to have reduced the chunk
// that it returns.
constexpr size_t kLead = 1;

// Raw chunks of one peer that may have arrived and not been reduced.
constexpr size_t kSlots = 2;

size_t longest_of(std::span<const size_t> bounds) {
  size_t longest = 0;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) longest = std::max(longest, bounds[i + 1] - bounds[i]);
  return longest;
}

}  // namespace

// Streams cannot wait for each other in a cycle. Chunk k of any stream waits only for chunks below k (a slot that chunk
// k - kSlots has left) or, if it is a finished chunk, for raw chunks k, which precede it in every stream.
SegmentReduce::Stream::Next SegmentReduce::Stream::next() const {
  if (raw < raw_chunks && (raw <= finished + kLead || finished == finished_chunks)) return Next::Raw;
  return finished < finished_chunks ? Next::Finished : Next::None;
}

void SegmentReduce::Stream::advance() { ++(next() == Next::Raw ? raw : finished); }

size_t SegmentReduce::chunk_for(const Mesh& mesh, size_t longest) {
  const size_t peers = std::max<size_t>(static_cast<size_t>(mesh.size()) - 1, 1);
  const size_t smallest = std::min(kSmallestChunk, mesh.chunk_bytes());
  const size_t largest = std::clamp(kArrivedBytes / peers, smallest, mesh.chunk_bytes());
  return std::clamp(whole_lines(longest / 2), smallest, whole_lines(largest));
}

SegmentReduce::SegmentReduce(Mesh& mesh, const BucketView& bucket, std::span<const size_t> bounds, DType dtype,
                             const Reduction& reduction, std::optional<std::byte*> mine)
    : mesh_(mesh),
      bucket_(bucket),
      bounds_(bounds),
      dtype_(dtype),
      reduction_(reduction),
      mine_(mine),
      chunk_bytes_(chunk_for(mesh, longest_of(bounds))) {
  take_scratch();
}

SegmentReduce::SegmentReduce(Mesh& mesh, const BucketView& bucket, std::span<const size_t> bounds, DType dtype,
                             const Reduction& reduction, size_t chunk_bytes)
    : mesh_(mesh),
      bucket_(bucket),
      bounds_(bounds),
      dtype_(dtype),
      reduction_(reduction),
      chunk_bytes_(chunk_bytes),
      allowed_(0) {
  take_scratch();
}

void SegmentReduce::take_scratch() {
  const int size = mesh_.size();
  const size_t peers = static_cast<size_t>(size) - 1;
  std::byte* scratch = mesh_.scratch(peers * (kSlots + 2) * chunk_bytes_);
  const auto take = [&](size_t chunks) { return std::exchange(scratch, scratch + chunks * chunk_bytes_); };
  peers_.resize(peers);
  sources_.resize(static_cast<size_t>(size));
  for (size_t i = 0; i < peers; ++i) {
    PeerStreams& streams = peers_[i];
    // Each rank starts with its right-hand neighbour, so that no rank is the first of all others.
    const int peer = (mesh_.rank() + 1 + static_cast<int>(i)) % size;
    streams.out.link = streams.in.link = &mesh_.link(peer);
    streams.send.raw_chunks = chunks_of(peer);
    streams.receive.raw_chunks = chunks_of(mesh_.rank());
    if (!mine_) {
      streams.send.finished_chunks = chunks_of(mesh_.rank());
      streams.receive.finished_chunks = chunks_of(peer);
    }
    streams.slots = take(kSlots);
    streams.send.staging = take(1);
    streams.receive.staging = take(1);
  }
}

size_t SegmentReduce::chunks_of(int rank) const {
  const auto r = static_cast<size_t>(rank);
  return (bounds_[r + 1] - bounds_[r] + chunk_bytes_ - 1) / chunk_bytes_;
}

SegmentReduce::Range SegmentReduce::chunk(int rank, size_t number) const {
  const auto r = static_cast<size_t>(rank);
  const size_t offset = bounds_[r] + number * chunk_bytes_;
  return {offset, std::min(chunk_bytes_, bounds_[r + 1] - offset)};
}

void SegmentReduce::run() {
  LinkWaiter waiter(mesh_);
  for (;;) {
    const bool moved = step();
    if (done()) return;
    if (moved) {
      waiter.moved();
      continue;
    }
    want(waiter);
    waiter.pause();
  }
}

bool SegmentReduce::step() {
  bool moved = false;
  for (PeerStreams& streams : peers_) {
    moved |= push(streams);
    moved |= pull(streams);
    moved |= reduce_arrived();
  }
  return peers_.empty() ? reduce_arrived() : moved;
}

void SegmentReduce::want(LinkWaiter& waiter) const {
  for (const PeerStreams& streams : peers_) waiter.want(peer_of(streams), streams.in.left != 0, streams.out.left != 0);
}

size_t SegmentReduce::gathered() const {
  constexpr size_t kAll = std::numeric_limits<size_t>::max();
  size_t chunks = reduced_ == chunks_of(mesh_.rank()) ? kAll : reduced_;
  for (const PeerStreams& streams : peers_) {
    const Stream& stream = streams.receive;
    if (stream.finished < stream.finished_chunks) chunks = std::min(chunks, stream.finished);
  }
  return chunks;
}

bool SegmentReduce::done() const {
  const auto at_end = [](const PeerStreams& streams) {
    return streams.send.next() == Stream::Next::None && streams.receive.next() == Stream::Next::None;
  };
  return reduced_ == chunks_of(mesh_.rank()) && std::ranges::all_of(peers_, at_end);
}

bool SegmentReduce::push(PeerStreams& streams) {
  if (streams.out.left == 0 && !load(streams)) return false;
  const bool moved = streams.out.push();
  if (streams.out.left == 0) streams.send.advance();
  return moved;
}

/// Selects the next chunk to send; false if there is none yet.
bool SegmentReduce::load(PeerStreams& streams) {
  Stream& stream = streams.send;
  const auto next = stream.next();
  if (next == Stream::Next::None) return false;
  if (next == Stream::Next::Raw) {
    if (stream.raw >= allowed_) return false;
    const Range range = chunk(peer_of(streams), stream.raw);
    streams.out.at = input_run(bucket_, range.offset, range.bytes, stream.staging);
    streams.out.left = range.bytes;
    return true;
  }
  if (stream.finished >= reduced_) return false;
  const Range range = chunk(mesh_.rank(), stream.finished);
  streams.out.at = output_run(bucket_, range.offset, range.bytes, stream.staging);
  streams.out.left = range.bytes;
  return true;
}

bool SegmentReduce::pull(PeerStreams& streams) {
  if (streams.in.left == 0 && !make_room(streams)) return false;
  const bool moved = streams.in.pull();
  if (streams.in.left != 0) return moved;
  Stream& stream = streams.receive;
  if (stream.next() == Stream::Next::Finished) {
    const Range range = chunk(peer_of(streams), stream.finished);
    write_output(bucket_, range.offset, range.bytes, streams.in.at - range.bytes, stream.staging);
  }
  stream.advance();
  return moved;
}

/// Selects the place for the next chunk to receive; false if there is none yet.
bool SegmentReduce::make_room(PeerStreams& streams) {
  Stream& stream = streams.receive;
  const auto next = stream.next();
  if (next == Stream::Next::None) return false;
  if (next == Stream::Next::Raw) {
    if (stream.raw >= reduced_ + kSlots) return false;
    streams.in.at = streams.slots + stream.raw % kSlots * chunk_bytes_;
    streams.in.left = chunk(mesh_.rank(), stream.raw).bytes;
    return true;
  }
  const Range range = chunk(peer_of(streams), stream.finished);
  streams.in.at = output_place(bucket_, range.offset, range.bytes, stream.staging);
  streams.in.left = range.bytes;
  return true;
}

bool SegmentReduce::reduce_arrived() {
  const size_t before = reduced_;
  const auto arrived = [&](const PeerStreams& streams) { return streams.receive.raw > reduced_; };
  const size_t end = std::min(chunks_of(mesh_.rank()), allowed_);
  while (reduced_ < end && std::ranges::all_of(peers_, arrived)) reduce_chunk(reduced_++);
  return reduced_ != before;
}

void SegmentReduce::reduce_chunk(size_t number) {
  const Range range = chunk(mesh_.rank(), number);
  const size_t slot = number % kSlots * chunk_bytes_;
  bucket_.for_each(range.offset, range.bytes, [&](const Piece& part, size_t done) {
    for (const PeerStreams& streams : peers_)
      sources_[static_cast<size_t>(peer_of(streams))] = streams.slots + slot + done;
    sources_[static_cast<size_t>(mesh_.rank())] = part.in;
    std::byte* to = mine_ ? *mine_ + number * chunk_bytes_ + done : part.out;
    reduce(dtype_, reduction_, to, sources_, part.bytes / size_of(dtype_));
  });
}

}  // namespace farandole
