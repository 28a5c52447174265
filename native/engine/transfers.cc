#include "engine/transfers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "transport/shm_link.h"
#include "transport/tcp.h"

namespace farandole {
namespace {

// A receiver keeps messages of up to this size that nothing has taken yet. Larger ones save the copy, and bound that
// memory, for an exchange of headers.
constexpr size_t kSmallMessage = size_t{32} << 10;
constexpr int kMostSteps = 64;  // with one peer, before other peers and waiting threads have their turn
constexpr uint64_t kSecond = 1'000'000'000;

std::string text_of(const Transfer& transfer) {
  return transfer.request.type_text() + " of " + std::to_string(transfer.request.bytes()) + " bytes";
}

}  // namespace

Transfers::Transfers(Wiring& wiring, std::chrono::nanoseconds timeout, Pending& pending, Driver& driver,
                     FailureDetector& failures)
    : wiring_(wiring),
      timeout_(static_cast<uint64_t>(timeout.count())),
      pending_(pending),
      driver_(driver),
      failures_(failures),
      peers_(static_cast<size_t>(wiring.size)) {
  for (int rank = 0; rank < wiring.size; ++rank) peer(rank).rank = rank;
  const int own = wiring.local_rank();
  for (size_t i = 0; i < wiring.local_ranks.size(); ++i) {
    const auto place = static_cast<int>(i);
    if (place == own) continue;
    Peer& local = peer(wiring.local_ranks[i]);
    Segment& segment = *wiring.segment;
    local.link = std::make_unique<ShmLink>(local.rank, segment.area(place), segment.transfer_ring(own, place),
                                           segment.transfer_ring(place, own), true);
    local.doorbell = &segment.area(place).doorbell;
  }
  for (Wiring::Remote& remote : wiring.remotes)
    if (remote.transfers.is_open())
      peer(remote.peer).link = std::make_unique<TcpLink>(remote.peer, remote.transfers.release());
  for (const Peer& each : peers_)
    if (!each.link && each.rank != wiring.rank)
      throw Error::internal("there is no message link to rank " + std::to_string(each.rank));
}

void Transfers::post(const TransferPtr& transfer) {
  const bool known = transfer->peer >= 0 && transfer->peer < wiring_.size && transfer->peer != wiring_.rank;
  if (!known && (transfer->sends || transfer->peer != kAnyRank || wiring_.size == 1))
    throw Error::invalid(transfer->request.name, "there is no other rank " + std::to_string(transfer->peer) +
                                                     "; ranks are 0 to " + std::to_string(wiring_.size - 1));
  pending_.add_transfer(transfer);
  const std::lock_guard lock(posted_mu_);
  posted_.push_back(transfer);
}

bool Transfers::progress() {
  if (!pending_.has_transfers()) return false;
  bool moved = take_posted();
  for (Peer& each : peers_)
    if (each.is_read()) moved = serve(each) || moved;
  return moved;
}

bool Transfers::take_posted() {
  std::vector<TransferPtr> posted;
  {
    const std::lock_guard lock(posted_mu_);
    posted.swap(posted_);
  }
  for (const TransferPtr& transfer : posted) transfer->sends ? begin_send(transfer) : begin_receive(transfer);
  return !posted.empty();
}

void Transfers::begin_send(const TransferPtr& transfer) {
  Peer& to = peer(transfer->peer);
  if (to.lost) return fail(transfer, *to.lost);
  const size_t bytes = transfer->request.bytes();
  if (bytes <= kSmallMessage) {
    to.out.push_back({{Part::Whole, transfer->tag, 0, bytes}, {transfer->input, bytes}, transfer});
    return;
  }
  to.offered.emplace(++to.offers, transfer);
  to.out.push_back({{Part::Offer, transfer->tag, to.offers, bytes}, {}, nullptr});
}

void Transfers::begin_receive(const TransferPtr& transfer) {
  const auto found = std::ranges::find_if(
      arrived_, [&](const Arrival& arrival) { return transfer->fits(arrival.source, arrival.header.tag); });
  if (found != arrived_.end()) {
    Arrival arrival = std::move(*found);
    arrived_.erase(found);
    return deliver(transfer, arrival);
  }
  if (transfer->peer != kAnyRank && peer(transfer->peer).lost) return fail(transfer, *peer(transfer->peer).lost);
  if (transfer->peer == kAnyRank && all_lost()) return fail(transfer, *peer(wiring_.rank == 0 ? 1 : 0).lost);
  waiting_.push_back(transfer);
  count_receive(*transfer, true);
}

void Transfers::count_receive(const Transfer& transfer, bool more) {
  for (Peer& each : peers_)
    if (transfer.peer == each.rank || transfer.peer == kAnyRank) each.receives += more ? 1 : -1;
}

/// Return whether anything moved. A peer that has left in order takes only its own messages with it.
bool Transfers::serve(Peer& peer) {
  try {
    const bool received = receive(peer);  // first: all that it sent before it left
    return send(peer) || received;
  } catch (const Error& error) {
    const Error cause = failures_.root_cause(error);
    if (!failures_.has_left(cause) && !failures_.has_left(peer.rank)) throw cause;
    part_with(peer, cause);
    return true;
  }
}

bool Transfers::send(Peer& peer) {
  bool moved = false;
  for (int step = 0; step < kMostSteps && !peer.out.empty(); ++step) {
    Outgoing& next = peer.out.front();
    const auto header = std::as_bytes(std::span(&next.header, 1));
    const bool in_header = peer.out_at < header.size();
    const auto rest = in_header ? header.subspan(peer.out_at) : next.payload.subspan(peer.out_at - header.size());
    const size_t sent = rest.empty() ? 0 : peer.link->try_send(rest);
    if (sent == 0 && !rest.empty()) break;
    moved = true;
    peer.out_at += sent;
    if (peer.out_at < header.size() + next.payload.size()) continue;
    const TransferPtr transfer = std::move(next.transfer);
    peer.out.pop_front();
    peer.out_at = 0;
    if (transfer) complete(transfer);
  }
  return moved;
}

bool Transfers::receive(Peer& peer) {
  const auto header = std::as_writable_bytes(std::span(&peer.in, 1));
  bool moved = false;
  for (int step = 0; step < kMostSteps; ++step) {
    const bool in_header = peer.in_at < header.size();
    const size_t got =
        peer.link->try_recv(in_header ? header.subspan(peer.in_at) : peer.room.subspan(peer.in_at - header.size()));
    if (got == 0) break;
    moved = true;
    peer.in_at += got;
    if (in_header && peer.in_at == header.size()) begin(peer);
    if (peer.in_at == header.size() + peer.room.size()) end(peer);
  }
  if (moved && peer.doorbell != nullptr) peer.doorbell->bump();  // there is room in the ring again
  return moved;
}

/// Find room for what follows a header.
void Transfers::begin(Peer& peer) {
  const Header& header = peer.in;
  if (header.part == Part::Whole && header.bytes <= kSmallMessage) {
    peer.whole.resize(header.bytes);
    peer.room = peer.whole;
  } else if (header.part == Part::Payload) {
    const auto found = peer.granted.find(header.number);
    if (found == peer.granted.end() || found->second->request.bytes() != header.bytes)
      throw Error::internal("rank " + std::to_string(peer.rank) + " sent a message that was not granted");
    peer.room = {found->second->output, header.bytes};
  } else if (header.part == Part::Whole || header.part > Part::Withdrawal) {
    throw Error::internal("rank " + std::to_string(peer.rank) + " sent an unknown message");
  }
}

/// Act on a header and what has followed it.
void Transfers::end(Peer& peer) {
  const Header header = peer.in;
  peer.in_at = 0;
  peer.room = {};
  switch (header.part) {
    case Part::Whole:
    case Part::Offer: return arrive({peer.rank, header, std::move(peer.whole)});
    case Part::Grant:
      if (const TransferPtr transfer = take(peer.offered, header.number))
        peer.out.push_back({{Part::Payload, 0, header.number, transfer->request.bytes()},
                            {transfer->input, transfer->request.bytes()},
                            transfer});
      else peer.out.push_back({{Part::Withdrawal, 0, header.number}, {}, nullptr});
      return;
    case Part::Payload:
      if (const TransferPtr transfer = take(peer.granted, header.number)) complete(transfer);
      return;
    case Part::Refusal:
      if (const TransferPtr transfer = take(peer.offered, header.number))
        fail(transfer, mismatch(*transfer, peer.rank, header.bytes));
      return;
    case Part::Withdrawal:
      if (const TransferPtr transfer = take(peer.granted, header.number)) fail(transfer, overdue(*transfer, now_ns()));
  }
}

TransferPtr Transfers::take(std::map<uint64_t, TransferPtr>& from, uint64_t number) const {
  auto node = from.extract(number);
  return node.empty() ? nullptr : std::move(node.mapped());
}

void Transfers::arrive(Arrival arrival) {
  const auto found = std::ranges::find_if(
      waiting_, [&](const TransferPtr& transfer) { return transfer->fits(arrival.source, arrival.header.tag); });
  if (found == waiting_.end()) return arrived_.push_back(std::move(arrival));
  const TransferPtr transfer = *found;
  waiting_.erase(found);
  count_receive(*transfer, false);
  deliver(transfer, arrival);
}

void Transfers::deliver(const TransferPtr& transfer, Arrival& arrival) {
  Peer& from = peer(arrival.source);
  const Header& header = arrival.header;
  const size_t bytes = transfer->request.bytes();
  if (header.bytes != bytes) {
    if (header.part == Part::Offer) from.out.push_back({{Part::Refusal, 0, header.number, bytes}, {}, nullptr});
    return fail(transfer, mismatch(*transfer, arrival.source, header.bytes));
  }
  transfer->source = arrival.source;
  if (header.part == Part::Whole) {
    if (bytes > 0) std::memcpy(transfer->output, arrival.payload.data(), bytes);
    return complete(transfer);
  }
  if (from.lost) return fail(transfer, *from.lost);
  from.granted.emplace(header.number, transfer);
  from.out.push_back({{Part::Grant, 0, header.number}, {}, nullptr});
}

/// Fail the messages to and from a peer that has left.
void Transfers::part_with(Peer& peer, const Error& error) {
  peer.lost = error;
  std::vector<TransferPtr> failed;
  for (const Outgoing& each : peer.out)
    if (each.transfer) failed.push_back(each.transfer);
  for (const auto* each : {&peer.offered, &peer.granted})
    for (const auto& [number, transfer] : *each) failed.push_back(transfer);
  peer.out.clear();
  peer.offered.clear();
  peer.granted.clear();
  const bool alone = all_lost();
  std::erase_if(waiting_, [&](const TransferPtr& transfer) {
    if (transfer->peer != peer.rank && !(transfer->peer == kAnyRank && alone)) return false;
    count_receive(*transfer, false);
    failed.push_back(transfer);
    return true;
  });
  for (const TransferPtr& transfer : failed) fail(transfer, error);
}

bool Transfers::all_lost() const {
  return std::ranges::all_of(peers_, [this](const Peer& each) { return each.lost || each.rank == wiring_.rank; });
}

void Transfers::check_overdue() {
  const uint64_t now = now_ns();
  if (timeout_ == 0 || !pending_.has_transfers() || now - overdue_checked_ns_ < std::min(timeout_ / 8, kSecond)) return;
  overdue_checked_ns_ = now;
  const auto is_late = [&](const Transfer& transfer) { return transfer.submitted_ns + timeout_ < now; };
  std::vector<TransferPtr> late;
  std::erase_if(waiting_, [&](const TransferPtr& transfer) {
    if (!is_late(*transfer)) return false;
    count_receive(*transfer, false);
    late.push_back(transfer);
    return true;
  });
  for (Peer& each : peers_) {
    std::erase_if(each.offered, [&](const auto& offer) {
      if (is_late(*offer.second)) late.push_back(offer.second);
      return is_late(*offer.second);
    });
    // What the peer has granted, or has received in part, cannot be taken back.
    for (const auto& [number, transfer] : each.granted)
      if (is_late(*transfer)) throw overdue(*transfer, now);
    const auto unsent = each.out.begin() + (each.out_at > 0 ? 1 : 0);
    for (auto at = each.out.begin(); at != each.out.end(); ++at)
      if (at->transfer && is_late(*at->transfer) && (at < unsent || at->header.part == Part::Payload))
        throw overdue(*at->transfer, now);
    each.out.erase(std::remove_if(unsent, each.out.end(),
                                  [&](const Outgoing& next) {
                                    if (!next.transfer || !is_late(*next.transfer)) return false;
                                    late.push_back(next.transfer);
                                    return true;
                                  }),
                   each.out.end());
  }
  for (const TransferPtr& transfer : late) fail(transfer, overdue(*transfer, now));
}

Error Transfers::overdue(const Transfer& transfer, uint64_t now) const {
  std::vector<int> ranks;
  if (transfer.peer != kAnyRank || transfer.source >= 0)
    ranks.push_back(transfer.source >= 0 ? transfer.source : transfer.peer);
  return Error::timeout(transfer.request.name, std::move(ranks), seconds_of(now - transfer.submitted_ns));
}

Error Transfers::mismatch(const Transfer& transfer, int other, uint64_t bytes) const {
  return Error::mismatch(transfer.request.name, "size",
                         {{wiring_.rank, text_of(transfer)}, {other, std::to_string(bytes) + " bytes"}});
}

void Transfers::arm_doorbell() {
  if (!pending_.has_transfers()) return;
  if (!watcher_ && !wiring_.is_one_host()) {
    std::vector<Watchable*> streams;
    for (Peer& each : peers_) streams.push_back(&each);
    watcher_ = std::make_unique<SocketWatcher>(streams, wiring_.own_area().doorbell, std::chrono::nanoseconds(0));
  }
  if (watcher_) watcher_->listen();
}

void Transfers::complete(const TransferPtr& transfer) {
  pending_.remove_transfer(transfer);
  driver_.complete(transfer);
}

void Transfers::fail(const TransferPtr& transfer, const Error& error) {
  pending_.remove_transfer(transfer);
  driver_.fail(transfer, error);
}

}  // namespace farandole
