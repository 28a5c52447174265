#include "collectives/link_segments.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kSmallestChunk = 16 << 10;
// The bytes of one chunk from every peer, together. If more bytes are on their way, they queue in front of the cables:
// streams overtake each other there, and all wait for the slowest one. Smaller chunks take more system calls.
constexpr size_t kArrivedBytes = 512 << 10;

// The number of raw chunks by which a stream leads its finished ones: enough for the peer to have reduced the chunk
// that it returns.
constexpr size_t kLead = 1;

// Raw chunks of one peer that may have arrived and not been reduced.
constexpr size_t kSlots = 2;

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

size_t SegmentReduce::chunk_for(const Mesh& mesh, std::span<const size_t> bounds) {
  size_t longest = 0;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) longest = std::max(longest, bounds[i + 1] - bounds[i]);
  return chunk_for(mesh, longest);
}

SegmentReduce::SegmentReduce(Mesh& mesh, SegmentData& data, std::span<const size_t> bounds, size_t chunk_units,
                             bool gathers)
    : mesh_(mesh),
      data_(data),
      bounds_(bounds),
      chunk_units_(chunk_units),
      chunk_bytes_(chunk_units * data.unit_bytes()),
      gathers_(gathers) {
  take_scratch();
}

void SegmentReduce::take_scratch() {
  const int size = mesh_.size();
  const size_t peers = static_cast<size_t>(size) - 1;
  std::byte* scratch = mesh_.scratch(peers * (kSlots + 2) * chunk_bytes_);
  const auto take = [&](size_t chunks) { return std::exchange(scratch, scratch + chunks * chunk_bytes_); };
  peers_.resize(peers);
  inputs_.resize(static_cast<size_t>(size));
  for (size_t i = 0; i < peers; ++i) {
    PeerStreams& streams = peers_[i];
    // Each rank starts with its right-hand neighbour, so that no rank is the first of all others.
    const int peer = (mesh_.rank() + 1 + static_cast<int>(i)) % size;
    streams.out.link = streams.in.link = &mesh_.link(peer);
    streams.send.raw_chunks = chunks_of(peer);
    streams.receive.raw_chunks = chunks_of(mesh_.rank());
    if (gathers_) {
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
  return (bounds_[r + 1] - bounds_[r] + chunk_units_ - 1) / chunk_units_;
}

SegmentData::Run SegmentReduce::chunk(int rank, size_t number) const {
  const auto r = static_cast<size_t>(rank);
  const size_t begin = bounds_[r] + number * chunk_units_;
  return {begin, std::min(chunk_units_, bounds_[r + 1] - begin)};
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
    const SegmentData::Run run = chunk(peer_of(streams), stream.raw);
    streams.out.at = data_.input(run, stream.staging);
    streams.out.left = data_.bytes(run);
    return true;
  }
  if (stream.finished >= reduced_) return false;
  const SegmentData::Run run = chunk(mesh_.rank(), stream.finished);
  streams.out.at = data_.result(run, stream.staging);
  streams.out.left = data_.bytes(run);
  return true;
}

bool SegmentReduce::pull(PeerStreams& streams) {
  if (streams.in.left == 0 && !make_room(streams)) return false;
  const bool moved = streams.in.pull();
  if (streams.in.left != 0) return moved;
  Stream& stream = streams.receive;
  if (stream.next() == Stream::Next::Finished) {
    const SegmentData::Run run = chunk(peer_of(streams), stream.finished);
    data_.store(run, streams.in.at - data_.bytes(run), stream.staging);
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
    streams.in.left = data_.bytes(chunk(mesh_.rank(), stream.raw));
    return true;
  }
  const SegmentData::Run run = chunk(peer_of(streams), stream.finished);
  streams.in.at = data_.place(run, stream.staging);
  streams.in.left = data_.bytes(run);
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
  for (const PeerStreams& streams : peers_)
    inputs_[static_cast<size_t>(peer_of(streams))] = streams.slots + number % kSlots * chunk_bytes_;
  data_.reduce(chunk(mesh_.rank(), number), inputs_, static_cast<size_t>(mesh_.rank()));
}

void BucketData::reduce(Run run, std::span<const std::byte*> inputs, size_t mine) {
  sources_.resize(inputs.size());
  bucket_.for_each(run.begin, run.count, [&](const Piece& part, size_t done) {
    for (size_t rank = 0; rank < inputs.size(); ++rank) sources_[rank] = rank == mine ? part.in : inputs[rank] + done;
    std::byte* to = mine_ != nullptr ? mine_ + (run.begin - mine_begin_) + done : part.out;
    farandole::reduce(dtype_, reduction_, to, sources_, part.bytes / size_of(dtype_));
  });
}

}  // namespace farandole
