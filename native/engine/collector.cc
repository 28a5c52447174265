#include "engine/collector.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

/// Appends to `up`; extends its last run if `numbers` continues it.
void append(CollectedRequests& up, const NumberRange& numbers) {
  auto* last = up.empty() ? nullptr : std::get_if<NumberRange>(&up.back());
  if (last != nullptr && last->rank == numbers.rank && last->whole == numbers.whole &&
      last->first + last->count == numbers.first)
    last->count += numbers.count;
  else up.emplace_back(numbers);
}

}  // namespace

Collector::Collector(int rank, const std::vector<int>& children, double merge_wait)
    : members_{rank}, merge_wait_(merge_wait) {
  for (const int child : children) {
    places_[child] = members_.size();
    members_.push_back(child);
  }
}

void Collector::add(const RequestBatch& batch, double now) {
  for (const auto& wanted : batch) {
    if (const auto* id = std::get_if<uint32_t>(&wanted)) add(0, *id, now);
    else if (const auto* carrying = std::get_if<NumberWithInput>(&wanted))
      forward(RequestWithInput{members_[0], carrying->id, carrying->input});
    else forward(FullRequest{members_[0], std::get<Request>(wanted)});
  }
}

void Collector::add(int child, CollectedRequests collected, double now) {
  const size_t place = places_.at(child);
  for (auto& item : collected) {
    if (auto* full = std::get_if<FullRequest>(&item)) {
      forward(std::move(*full));
      continue;
    }
    if (auto* carrying = std::get_if<RequestWithInput>(&item)) {
      forward(std::move(*carrying));
      continue;
    }
    const auto& numbers = std::get<NumberRange>(item);
    if (numbers.rank != kSender) {
      forward(numbers);
      continue;
    }
    require_known(numbers.first, numbers.count);
    for (uint32_t i = 0; i < numbers.count; ++i) add(place, numbers.first + i, now);
  }
}

void Collector::add(size_t place, uint32_t id, double now) {
  Number& wanted = number(id);
  if (incomplete_ || !joined_.empty() || wanted.unmerged) return send_up(place, id);
  if (wanted.asked.has(static_cast<int>(place)))
    throw Error::internal("rank " + std::to_string(members_[place]) + " requested number " + std::to_string(id) +
                          " twice");
  if (wanted.asked.empty()) {
    wanted.since = now;
    ++held_count_;
  }
  wanted.asked.add(static_cast<int>(place));
  if (wanted.asked.count() < members_.size()) return;
  wanted.asked.clear();
  --held_count_;
  complete_.push_back(id);
}

/// A rank below could not merge these numbers, so they stay unmerged here until a plan resolves them.
void Collector::forward(const NumberRange& numbers) {
  require_known(numbers.first, numbers.count);
  for (uint32_t i = 0; i < numbers.count; ++i) stop_merging(numbers.first + i);
  append(up_, numbers);
}

void Collector::forward(FullRequest full) {
  const Request& request = full.request;
  if (request.kind == Kind::Join) {
    send_all_separately();
    joined_ = request.name;
  }
  if (const auto known = by_name_.find(request.name); known != by_name_.end()) stop_merging(known->second);
  up_.emplace_back(std::move(full));
}

/// Without a merge: the coordinator needs the input of each rank.
void Collector::forward(RequestWithInput carrying) {
  stop_merging(carrying.id);
  up_.emplace_back(std::move(carrying));
}

/// Sends up a request of the member at `place`: this rank alone, or a child with its whole subtree.
void Collector::send_up(size_t place, uint32_t id) { append(up_, {members_[place], place != 0, id, 1}); }

void Collector::stop_merging(uint32_t id) {
  send_separately(id);
  number(id).unmerged = true;
}

void Collector::send_separately(uint32_t id) {
  Number& held = number(id);
  if (held.asked.empty()) return;
  held.asked.each([&](int place) { send_up(static_cast<size_t>(place), id); });
  held.asked.clear();
  --held_count_;
  held.unmerged = true;
}

void Collector::send_all_separately() {
  for (uint32_t id = 0; held_count_ > 0 && id < numbers_.size(); ++id) send_separately(id);
}

void Collector::leave() {
  send_all_separately();
  incomplete_ = true;
}

void Collector::learn(const Plan& plan) {
  for (const auto& item : plan) {
    if (const auto* refusal = std::get_if<Refusal>(&item)) {
      merge_again(refusal->name);
      if (refusal->name == joined_) joined_.clear();
    }
    const auto* bucket = std::get_if<Bucket>(&item);
    if (bucket == nullptr) continue;
    if (bucket->kind == Kind::Join) joined_.clear();
    for (const Entry& entry : bucket->entries) learn(entry);
  }
}

void Collector::learn(const Entry& entry) {
  if (entry.name.empty()) {
    require_known(entry.id, entry.count);
    for (uint32_t i = 0; i < entry.count; ++i) number(entry.id + i).unmerged = false;
    return;
  }
  merge_again(entry.name);
  if (entry.id == kNoId) return;
  // The coordinator counts numbers up from zero, but members of a group get theirs before they are sent.
  if (entry.id > numbers_.size() + kMostNumbers)
    throw Error::internal("the plan holds an impossible number: " + std::to_string(entry.id));
  if (entry.id >= numbers_.size()) numbers_.resize(entry.id + 1);
  by_name_[entry.name] = entry.id;
}

void Collector::merge_again(const std::string& name) {
  if (const auto known = by_name_.find(name); known != by_name_.end()) number(known->second).unmerged = false;
}

Collector::Number& Collector::number(uint32_t id) {
  require_known(id, 1);
  return numbers_[id];
}

void Collector::require_known(uint32_t first, uint32_t count) const {
  if (uint64_t{first} + count > numbers_.size())
    throw Error::internal("ranks requested the unknown number " + std::to_string(first + (count - 1)));
}

CollectedRequests Collector::drain(double now) {
  if (held_count_ > 0 && now - checked_ >= merge_wait_ / 4) {
    checked_ = now;
    for (uint32_t id = 0; id < numbers_.size(); ++id)
      if (!numbers_[id].asked.empty() && now - numbers_[id].since >= merge_wait_) send_separately(id);
  }
  // Complete numbers come first: a rank may have left after them.
  CollectedRequests up;
  std::sort(complete_.begin(), complete_.end());
  for (const uint32_t id : complete_) append(up, {kSender, true, id, 1});
  complete_.clear();
  if (up.empty()) return std::exchange(up_, {});
  up.insert(up.end(), std::make_move_iterator(up_.begin()), std::make_move_iterator(up_.end()));
  up_.clear();
  return up;
}

void deliver(CollectedRequests collected, int sender, Tree& tree, Negotiator& negotiator, double now) {
  const auto from = [&](int32_t rank) {
    if (tree.holds(rank) && tree.is_below(rank, sender)) return rank;
    throw Error::internal("rank " + std::to_string(sender) + " sent a request of rank " + std::to_string(rank));
  };
  for (auto& item : collected) {
    if (auto* full = std::get_if<FullRequest>(&item)) {
      negotiator.add(from(full->rank), std::move(full->request), now);
      continue;
    }
    if (auto* carrying = std::get_if<RequestWithInput>(&item)) {
      negotiator.add(from(carrying->rank), carrying->id, std::move(carrying->input), now);
      continue;
    }
    const auto& numbers = std::get<NumberRange>(item);
    const int32_t speaker = numbers.rank == kSender ? sender : from(numbers.rank);
    RankSet alone;
    if (!numbers.whole) alone.add(speaker);
    const RankSet& ranks = numbers.whole ? tree.below(speaker) : alone;
    for (uint32_t i = 0; i < numbers.count; ++i) negotiator.add(ranks, numbers.first + i, now);
  }
}

}  // namespace farandole
