#include "collectives/link_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace farandole {
namespace {

// The most bytes per system call, so that both directions of all links take turns.
constexpr size_t kTurn = 256 << 10;

// Within this time, an uninvolved peer that hangs up may have finished the operation and left.
constexpr uint64_t kGraceNs = 500'000'000;

}  // namespace

bool Outgoing::push() {
  const size_t sent = link->try_send({at, std::min(left, kTurn)});
  at += sent;
  left -= sent;
  return sent != 0;
}

bool Incoming::pull() {
  const size_t got = link->try_recv({at, std::min(left, kTurn)});
  at += got;
  left -= got;
  return got != 0;
}

LinkWaiter::LinkWaiter(Mesh& mesh) : mesh_(mesh), waiter_(mesh.waiter()) {
  fds_.reserve(static_cast<size_t>(mesh.size()));
  peers_.reserve(static_cast<size_t>(mesh.size()));
  for (int peer = 0; peer < mesh.size(); ++peer) {
    if (peer == mesh.rank() || mesh.link(peer).fd() < 0) continue;
    fds_.push_back({mesh.link(peer).fd(), POLLRDHUP, 0});
    peers_.push_back(peer);
  }
}

void LinkWaiter::moved() {
  waiter_.moved();
  hung_up_since_ns_ = 0;
}

void LinkWaiter::want(int peer, bool reading, bool writing) {
  if (!reading && !writing) return;
  const auto at = std::lower_bound(peers_.begin(), peers_.end(), peer);
  if (at == peers_.end() || *at != peer) {
    wants_memory_ = true;
    return;
  }
  pollfd& entry = fds_[static_cast<size_t>(at - peers_.begin())];
  entry.events = static_cast<short>(entry.events | (reading ? POLLIN : 0) | (writing ? POLLOUT : 0));
}

void LinkWaiter::pause() {
  if (std::exchange(wants_memory_, false)) {
    waiter_.pause();
  } else {
    for (pollfd& entry : fds_) entry.revents = 0;
    waiter_.pause(fds_);
    look_for_lost();
  }
  for (pollfd& entry : fds_) entry.events = POLLRDHUP;
}

void LinkWaiter::look_for_lost() {
  for (size_t i = 0; i < fds_.size(); ++i) {
    // Reading detects the end itself, after all data sent before it.
    if ((fds_[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0 || (fds_[i].events & POLLIN) != 0) continue;
    if (mesh_.guard().has_left(mesh_.link(peers_[i]).rank())) {
      fds_[i].fd = -1;  // poll() would return at once for ever; what the peer has sent is here
      continue;
    }
    const uint64_t now = now_ns();
    if (hung_up_since_ns_ == 0) hung_up_since_ns_ = now;
    if (now - hung_up_since_ns_ < kGraceNs) return;
    throw Error::peer_lost("", mesh_.link(peers_[i]).rank(), "closed the connection");
  }
}

void exchange(Mesh& mesh, std::span<Outgoing> sends, std::span<Incoming> receives) {
  LinkWaiter waiter(mesh);
  for (;;) {
    bool moved = false;
    bool done = true;
    for (Outgoing& out : sends) {
      if (out.left == 0) continue;
      moved |= out.push();
      done &= out.left == 0;
    }
    for (Incoming& in : receives) {
      if (in.left == 0) continue;
      moved |= in.pull();
      done &= in.left == 0;
    }
    if (done) return;
    if (moved) {
      waiter.moved();
      continue;
    }
    for (const Outgoing& out : sends)
      if (out.left != 0) waiter.want(out.link->peer(), false, true);
    for (const Incoming& in : receives)
      if (in.left != 0) waiter.want(in.link->peer(), true, false);
    waiter.pause();
  }
}

const std::byte* input_run(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging) {
  const std::byte* run = nullptr;
  bucket.for_each(offset, bytes, [&](const Piece& part, size_t done) {
    if (part.bytes == bytes) run = part.in;
    else std::memcpy(staging + done, part.in, part.bytes);
  });
  return run != nullptr ? run : staging;
}

const std::byte* output_run(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging) {
  const std::byte* run = nullptr;
  bucket.for_each(offset, bytes, [&](const Piece& part, size_t done) {
    if (part.bytes == bytes) run = part.out;
    else std::memcpy(staging + done, part.out, part.bytes);
  });
  return run != nullptr ? run : staging;
}

std::byte* output_place(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging) {
  std::byte* place = staging;
  bucket.for_each(offset, bytes, [&](const Piece& part, size_t) {
    if (part.bytes == bytes) place = part.out;
  });
  return place;
}

void write_output(const BucketView& bucket, size_t offset, size_t bytes, const std::byte* run,
                  const std::byte* staging) {
  if (run != staging) return;
  bucket.for_each(offset, bytes,
                  [&](const Piece& part, size_t done) { std::memcpy(part.out, run + done, part.bytes); });
}

void copy_through(const BucketView& bucket) {
  for (const Piece& piece : bucket.pieces())
    if (piece.bytes != 0 && piece.in != piece.out) std::memcpy(piece.out, piece.in, piece.bytes);
}

}  // namespace farandole
