#include "engine/control_tree.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "transport/shm_link.h"
#include "transport/tcp.h"

namespace farandole {
namespace {

double seconds(std::chrono::nanoseconds span) { return seconds_of(static_cast<uint64_t>(span.count())); }

double now_s() { return seconds_of(now_ns()); }

/// Return the seconds that a rank waits for the ranks below before it reports late ones to the coordinator.
double merge_wait_of(const EngineOptions& options) {
  const double timeout = seconds(options.timeout);
  return timeout > 0 ? std::min(1.0, timeout / 4) : 1.0;
}

}  // namespace

ControlTree::ControlTree(Wiring& wiring, const EngineOptions& options, Pending& pending, const Trace& trace)
    : wiring_(wiring),
      pending_(pending),
      trace_(trace),
      stall_(seconds(options.stall)),
      timeout_(seconds(options.timeout)),
      carries_(wiring.carries_inputs()),
      tree_(wiring.parents),
      negotiator_({wiring.size, options.knobs.fusion_threshold, options.cache_capacity, seconds(options.timeout),
                   options.look_ahead, wiring.members}),
      collector_(wiring.rank, tree_.children(wiring.rank), merge_wait_of(options)),
      left_(static_cast<size_t>(wiring.size)),
      departure_announced_(static_cast<size_t>(wiring.size)) {
  if (!wiring.is_coordinator()) connect(tree_.parent(wiring.rank));
  for (const int child : tree_.children(wiring.rank)) connect(child);
  if (has_remote_peers_) {
    std::vector<Watchable*> streams;
    for (ControlStream& stream : streams_) streams.push_back(&stream);
    watcher_ = std::make_unique<SocketWatcher>(streams, wiring.own_area().doorbell, options.heartbeat);
  }
  if (wiring.is_coordinator() && options.knobs != Knobs()) turn(options.knobs, false);
}

void ControlTree::connect(int peer) {
  const auto& local = wiring_.local_ranks;
  const int own = wiring_.local_rank();
  const auto at = std::find(local.begin(), local.end(), peer);
  if (at != local.end()) {
    const auto place = static_cast<int>(at - local.begin());
    if (place != 0 && own != 0)
      throw Error::internal("only the first rank of a host may have control connections to the others");
    Segment& segment = *wiring_.segment;
    streams_.emplace_back(std::make_unique<ShmLink>(peer, segment.area(place), segment.control_ring(own, place),
                                                    segment.control_ring(place, own), true));
    return;
  }
  const auto remote = std::ranges::find_if(
      wiring_.remotes, [&](const auto& each) { return each.peer == peer && each.control.is_open(); });
  if (remote == wiring_.remotes.end())
    throw Error::internal("there is no control connection to rank " + std::to_string(peer));
  streams_.emplace_back(std::make_unique<TcpLink>(peer, remote->control.release()));
  has_remote_peers_ = true;
}

bool ControlTree::send_requests() {
  RequestBatch batch = pending_.drain(carries_);
  if (batch.empty()) return false;
  {
    const std::lock_guard lock(mu_);
    for (const auto& item : batch)
      ++(std::holds_alternative<Request>(item) ? request_counts_.in_full : request_counts_.by_number);
  }
  const double now = now_s();
  if (!wiring_.is_coordinator()) {
    collector_.add(batch, now);
    return true;
  }
  RankSet own;
  own.add(wiring_.rank);
  for (auto& item : batch) {
    if (const auto* id = std::get_if<uint32_t>(&item)) negotiator_.add(own, *id, now);
    else if (auto* carrying = std::get_if<NumberWithInput>(&item))
      negotiator_.add(wiring_.rank, carrying->id, std::move(carrying->input), now);
    else negotiator_.add(wiring_.rank, std::move(std::get<Request>(item)), now);
  }
  return true;
}

bool ControlTree::receive() {
  bool moved = false;
  for (ControlStream& stream : streams_) {
    while (auto message = stream.receive()) {
      const int sender = stream.peer();
      if (auto* collected = std::get_if<CollectedRequests>(&*message)) handle(sender, std::move(*collected));
      else if (auto* plan = std::get_if<Plan>(&*message)) handle(sender, std::move(*plan));
      else if (const auto* departure = std::get_if<Departure>(&*message)) handle(sender, *departure);
      moved = true;
    }
  }
  return moved;
}

void ControlTree::handle(int sender, CollectedRequests collected) {
  if (is_parent(sender)) throw Error::internal("a parent sent requests: the control connections are crossed");
  if (wiring_.is_coordinator()) deliver(std::move(collected), sender, tree_, negotiator_, now_s());
  else collector_.add(sender, std::move(collected), now_s());
}

void ControlTree::handle(int sender, Plan plan) {
  if (!is_parent(sender))
    throw Error::internal("rank " + std::to_string(sender) + " sent a plan, which only rank 0 decides");
  collector_.learn(plan);
  adopt(std::move(plan), false);
}

void ControlTree::handle(int sender, const Departure& departure) {
  if (!departure.clean)
    throw announced_.emplace(departure.rank == kNoRank ? Error::timeout("", {}, timeout_)
                                                       : Error::peer_lost("", departure.rank, departure.reason));
  if (!tree_.holds(departure.rank) || !tree_.holds(departure.first)) throw Error::internal("an unknown rank has left");
  if (!is_parent(sender)) {
    announce_departure(departure.rank, departure.first);
    return;
  }
  first_left_ = departure.first;
  left_[static_cast<size_t>(departure.rank)] = true;
  if (departure.rank == sender) return;
  collector_.leave();
  send_to_children(departure);
}

/// Queue a plan of rank 0 for this rank, and send it to the ranks below.
void ControlTree::adopt(Plan plan, bool paced) {
  send_to_children(plan);
  for (const auto& item : plan) {
    const auto* refusal = std::get_if<Refusal>(&item);
    if (refusal != nullptr && refusal->error.kind == ErrorKind::PeerLost && !first_left_)
      first_left_ = refusal->error.rank;
  }
  plans_.push_back({std::move(plan), trace_.now(), paced});
}

bool ControlTree::decide() {
  if (!wiring_.is_coordinator()) return false;
  const double now = now_s();
  if (turning_.load()) {
    const std::lock_guard lock(mu_);
    negotiator_.limit_buckets(wanted_->fusion_threshold);
  }
  Plan plan = negotiator_.decide(now);
  find_stalls(now);
  if (plan.empty()) return false;
  const bool paced = add_knobs(plan);
  adopt(std::move(plan), paced);
  return true;
}

/// Put wanted knobs at the head of `plan` if it has a bucket: all ranks wait for that one, so no rank is in the lane.
/// Return whether to mark the steps from there on.
bool ControlTree::add_knobs(Plan& plan) {
  const auto is_bucket = [](const auto& item) { return std::holds_alternative<Bucket>(item); };
  if (!turning_.load() || std::ranges::none_of(plan, is_bucket)) return false;
  const std::lock_guard lock(mu_);
  plan.insert(plan.begin(), *wanted_);
  wanted_.reset();
  turning_.store(false);
  return wanted_paced_;
}

void ControlTree::forward() {
  if (wiring_.is_coordinator() || collector_.idle()) return;
  const CollectedRequests up = collector_.drain(now_s());
  if (!up.empty()) streams_.front().send(up);
}

void ControlTree::flush() {
  for (ControlStream& stream : streams_) stream.flush();
}

std::optional<AgreedPlan> ControlTree::next_plan() {
  if (plans_.empty()) return std::nullopt;
  AgreedPlan next = std::move(plans_.front());
  plans_.pop_front();
  return next;
}

void ControlTree::arm_doorbell() {
  if (watcher_) watcher_->listen();
}

void ControlTree::note_departure(int rank) {
  if (tree_.parent(wiring_.rank) == rank || tree_.parent(rank) == wiring_.rank) left_[static_cast<size_t>(rank)] = true;
}

bool ControlTree::has_departures() const {
  return std::ranges::any_of(streams_, [this](const ControlStream& stream) {
    const auto at = static_cast<size_t>(stream.peer());
    return left_[at] && (!departure_announced_[at] || is_parent(stream.peer()));
  });
}

void ControlTree::announce_departures() {
  for (const ControlStream& stream : streams_) {
    const int peer = stream.peer();
    const auto at = static_cast<size_t>(peer);
    if (!left_[at]) continue;
    if (!is_parent(peer)) {
      announce_departure(peer, peer);
      continue;
    }
    const int first = first_left_.value_or(peer);
    const char* const reason = reason_of(Life::State::Left);
    if (!departure_announced_[at]) send_to_children(Departure{peer, true, reason, first});
    departure_announced_[at] = true;
    if (pending_.has_requests()) throw Error::peer_lost("", first, reason);
  }
}

/// Announce that `rank`, a rank below this one, has left, and that `first` left first. `rank` did its part of all its
/// requests. Operations that lack a request of it or of the ranks below it can never run. All ranks learn of it, so
/// that no request is held back any more, and no rank counts it as lost.
void ControlTree::announce_departure(int rank, int first) {
  const auto at = static_cast<size_t>(rank);
  if (departure_announced_[at]) return;
  left_[at] = departure_announced_[at] = true;
  if (!first_left_) first_left_ = first;
  const std::string reason = reason_of(Life::State::Left);
  if (wiring_.is_coordinator()) {
    negotiator_.leave(tree_.below(rank), rank, reason);
    send_to_children(Departure{rank, true, reason, *first_left_});
    return;
  }
  collector_.leave();
  forward();
  streams_.front().send(Departure{rank, true, reason, first});
}

void ControlTree::announce_failure(const Departure& departure) {
  // The ranks of this host read it in the segment.
  for (ControlStream& stream : streams_)
    if (stream.fd() >= 0) stream.send(departure);
}

void ControlTree::leave(bool clean, uint64_t deadline) {
  for (ControlStream& stream : streams_) {
    if (clean)
      stream.send(Departure{wiring_.rank, true, reason_of(Life::State::Left), first_left_.value_or(wiring_.rank)});
    while (!stream.flush() && now_ns() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void ControlTree::turn(const Knobs& knobs, bool paced) {
  if (!wiring_.is_coordinator()) throw Error::invalid("turn", "only rank 0 can change the knobs");
  if (!knobs.valid()) throw Error::invalid("turn", "chunk sizes must be multiples of 64 bytes and at least 4 KiB");
  const std::lock_guard lock(mu_);
  wanted_ = knobs;
  wanted_paced_ = paced;
  turning_.store(true);
}

void ControlTree::find_stalls(double now) {
  if (stall_ == 0 || now - stalls_checked_ < std::min(0.5, stall_ / 4)) return;
  stalls_checked_ = now;
  auto found = negotiator_.waiting() > 0 ? negotiator_.stalls(now - stall_) : std::vector<Negotiator::Stall>();
  for (Negotiator::Stall& stall : found)
    for (auto* ranks : {&stall.asked, &stall.missing})
      for (int& rank : *ranks) rank = job_rank(rank, wiring_.members);
  const std::lock_guard lock(mu_);
  stalls_ = std::move(found);
}

std::vector<Negotiator::Stall> ControlTree::stalls() {
  const std::lock_guard lock(mu_);
  return stalls_;
}

ControlTree::RequestCounts ControlTree::request_counts() {
  const std::lock_guard lock(mu_);
  return request_counts_;
}

template <class Payload>
void ControlTree::send_to_children(const Payload& payload) {
  Bytes frame;
  for (ControlStream& stream : streams_) {
    if (is_parent(stream.peer()) || left_[static_cast<size_t>(stream.peer())]) continue;
    if (frame.empty()) encode(payload, frame);
    stream.send_frame(frame);
  }
}

}  // namespace farandole
