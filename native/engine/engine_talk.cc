#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "engine/engine.h"
#include "transport/shm_link.h"
#include "transport/tcp.h"

// How an engine talks to the others, along the tree of control connections: what ranks ask for goes up to rank 0, which
// decides; plans come down.
namespace farandole {

void Engine::connect_control() {
  const auto& local = wiring_.local_ranks;
  const auto connect = [&](int peer) {
    const auto at = std::find(local.begin(), local.end(), peer);
    if (at != local.end()) {
      const auto place = static_cast<int>(at - local.begin());
      if (place != 0 && local_rank_ != 0)
        throw Error::internal("of the ranks of a host only the first one talks to the others");
      controls_.emplace_back(std::make_unique<ShmLink>(peer, wiring_.segment->area(place),
                                                       wiring_.segment->control_ring(local_rank_, place),
                                                       wiring_.segment->control_ring(place, local_rank_), true));
      return;
    }
    const auto remote = std::find_if(wiring_.remotes.begin(), wiring_.remotes.end(),
                                     [&](const auto& each) { return each.peer == peer && each.control.is_open(); });
    if (remote == wiring_.remotes.end())
      throw Error::internal("there is no control connection to rank " + std::to_string(peer));
    controls_.emplace_back(std::make_unique<TcpLink>(peer, remote->control.release()));
    listens_always_ = true;
  };
  if (!leads()) connect(tree_.parent(wiring_.rank));
  for (const int child : tree_.children(wiring_.rank)) connect(child);
  if (listens_always_) doorman_ = std::make_unique<Doorman>(controls_, doorbell(), options_.heartbeat);
}

bool Engine::ask() {
  Asking asking = pending_.drain();
  if (asking.empty()) return false;
  {
    const std::lock_guard lock(stats_mu_);
    for (const auto& item : asking) ++(item.index() == 0 ? stats_.asked_by_number : stats_.asked_in_full);
  }
  if (lane_) lane_->pass();
  const double now = seconds_of(now_ns());
  if (!leads()) {
    collector_.ask(asking, now);
    return true;
  }
  RankSet own;
  own.add(wiring_.rank);
  for (auto& item : asking) {
    if (const auto* id = std::get_if<uint32_t>(&item)) negotiator_.ask(own, *id, now);
    else negotiator_.ask(wiring_.rank, std::move(std::get<Request>(item)), now);
  }
  return true;
}

bool Engine::hear() {
  bool moved = false;
  for (ControlStream& control : controls_) {
    while (auto message = control.receive()) {
      heed(control, std::move(*message));
      moved = true;
    }
  }
  return moved;
}

void Engine::forward() {
  if (collector_.idle()) return;
  const Gathered up = collector_.drain(seconds_of(now_ns()));
  if (!up.empty()) controls_.front().send(up);
}

void Engine::heed(const ControlStream& from, Message message) {
  const bool from_parent = is_parent(from);
  if (auto* gathered = std::get_if<Gathered>(&message)) {
    if (from_parent) throw Error::internal("the control connections are crossed: rank 0's side asks");
    const double now = seconds_of(now_ns());
    if (leads()) hand_over(std::move(*gathered), from.peer(), tree_, negotiator_, now);
    else collector_.ask(from.peer(), std::move(*gathered), now);
  } else if (auto* plan = std::get_if<Plan>(&message)) {
    if (!from_parent) throw Error::internal("rank " + std::to_string(from.peer()) + " decides what rank 0 decides");
    collector_.heed(*plan);
    heed(std::move(*plan));
  } else if (const auto* farewell = std::get_if<Farewell>(&message)) {
    if (!farewell->clean) throw verdict_.emplace(Error::peer_lost("", farewell->rank, farewell->reason));
    if (!tree_.holds(farewell->rank) || !tree_.holds(farewell->first))
      throw Error::internal("an unknown rank has left");
    if (!from_parent) {
      part_with(farewell->rank, farewell->first);
      return;
    }
    first_left_ = farewell->first;
    if (farewell->rank == from.peer()) {
      left_[static_cast<size_t>(from.peer())] = true;
    } else {
      collector_.leave();
      tell_children(*farewell);
    }
  }
}

/// The coordinator's word, for this rank and all below it.
void Engine::heed(Plan plan) {
  tell_children(plan);
  for (const auto& item : plan) {
    const auto* refusal = std::get_if<Refusal>(&item);
    if (refusal != nullptr && refusal->error.kind == ErrorKind::PeerLost && !first_left_)
      first_left_ = refusal->error.rank;
  }
  plans_.push_back({std::move(plan), trace_.now()});
}

bool Engine::decide() {
  const double now = seconds_of(now_ns());
  if (turning_.load()) {
    const std::lock_guard lock(stats_mu_);
    negotiator_.limit_buckets(wanted_->fusion_threshold);
  }
  Plan plan = negotiator_.decide(now);
  look_for_stalls(now);
  if (plan.empty()) return false;
  add_turn(plan);
  heed(std::move(plan));
  return true;
}

/// Lets wanted knobs go along with a plan that all ranks wait for: none of them is in the lane.
void Engine::add_turn(Plan& plan) {
  const auto is_bucket = [](const auto& item) { return std::holds_alternative<Bucket>(item); };
  if (!turning_.load() || std::ranges::none_of(plan, is_bucket)) return;
  const std::lock_guard lock(stats_mu_);
  plan.insert(plan.begin(), *wanted_);
  wanted_.reset();
  turning_.store(false);
}

/// `rank`, which is below this one, has shut down, and `first` was the first to do so. It did its part of all that it
/// had asked for; what it has not asked for can never run, nor what the ranks below it have not. All ranks hear of the
/// first one, so that no ask is held back any more.
void Engine::part_with(int rank, int first) {
  if (told_[static_cast<size_t>(rank)]) return;
  left_[static_cast<size_t>(rank)] = told_[static_cast<size_t>(rank)] = true;
  const bool is_first = !first_left_;
  if (is_first) first_left_ = first;
  const std::string reason = farandole::reason_of(Life::State::Left);
  if (leads()) {
    negotiator_.leave(tree_.below(rank), rank, reason);
    if (is_first) tell_children(Farewell{rank, true, reason, first});
    return;
  }
  collector_.leave();
  forward();
  controls_.front().send(Farewell{rank, true, reason, first});
}

template <class Payload>
void Engine::tell_children(const Payload& payload) {
  Bytes frame;
  for (ControlStream& control : controls_) {
    if (is_parent(control) || left_[static_cast<size_t>(control.peer())]) continue;
    if (frame.empty()) encode(payload, frame);
    control.send_frame(frame);
  }
}

template void Engine::tell_children(const Farewell&);

}  // namespace farandole
