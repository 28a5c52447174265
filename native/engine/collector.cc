#include "engine/collector.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

/// Adds to `up`, as one run with what was added last where possible.
void append(Gathered& up, const Numbers& numbers) {
  auto* last = up.empty() ? nullptr : std::get_if<Numbers>(&up.back());
  if (last != nullptr && last->rank == numbers.rank && last->whole == numbers.whole &&
      last->first + last->count == numbers.first)
    last->count += numbers.count;
  else up.emplace_back(numbers);
}

}  // namespace

Collector::Collector(int rank, const std::vector<int>& children, double patience)
    : members_{rank}, patience_(patience) {
  for (const int child : children) {
    places_[child] = members_.size();
    members_.push_back(child);
  }
}

void Collector::ask(const Asking& asking, double now) {
  for (const auto& wanted : asking) {
    if (const auto* id = std::get_if<uint32_t>(&wanted)) ask(0, *id, now);
    else pass({members_[0], std::get<Request>(wanted)});
  }
}

void Collector::ask(int child, Gathered gathered, double now) {
  const size_t place = places_.at(child);
  for (auto& item : gathered) {
    if (auto* spelled = std::get_if<Spelled>(&item)) {
      pass(std::move(*spelled));
      continue;
    }
    const auto& numbers = std::get<Numbers>(item);
    if (numbers.rank != kSender) {
      pass(numbers);
      continue;
    }
    require_known(numbers.first, numbers.count);
    for (uint32_t i = 0; i < numbers.count; ++i) ask(place, numbers.first + i, now);
  }
}

void Collector::ask(size_t place, uint32_t id, double now) {
  Number& wanted = number(id);
  if (incomplete_ || !joined_.empty() || wanted.apart) return speak_for(place, id);
  if (wanted.asked.has(static_cast<int>(place)))
    throw Error::internal("rank " + std::to_string(members_[place]) + " asked twice for number " + std::to_string(id));
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

/// A number that a rank below could not get merged: nobody here will, until it is settled.
void Collector::pass(const Numbers& numbers) {
  require_known(numbers.first, numbers.count);
  for (uint32_t i = 0; i < numbers.count; ++i) send_apart(numbers.first + i);
  append(up_, numbers);
}

void Collector::pass(Spelled spelled) {
  const Request& request = spelled.request;
  if (request.kind == Kind::Join) {
    let_go_of_all();
    joined_ = request.name;
  }
  if (const auto known = by_name_.find(request.name); known != by_name_.end()) send_apart(known->second);
  up_.emplace_back(std::move(spelled));
}

/// Whoever sits at `place` has asked: this rank for itself, a child for all of its subtree.
void Collector::speak_for(size_t place, uint32_t id) { append(up_, {members_[place], place != 0, id, 1}); }

void Collector::send_apart(uint32_t id) {
  let_go(id);
  number(id).apart = true;
}

void Collector::let_go(uint32_t id) {
  Number& held = number(id);
  if (held.asked.empty()) return;
  held.asked.each([&](int place) { speak_for(static_cast<size_t>(place), id); });
  held.asked.clear();
  --held_count_;
  held.apart = true;
}

void Collector::let_go_of_all() {
  for (uint32_t id = 0; held_count_ > 0 && id < numbers_.size(); ++id) let_go(id);
}

void Collector::leave() {
  let_go_of_all();
  incomplete_ = true;
}

void Collector::heed(const Plan& plan) {
  for (const auto& item : plan) {
    if (const auto* refusal = std::get_if<Refusal>(&item)) {
      settle(refusal->name);
      if (refusal->name == joined_) joined_.clear();
    }
    const auto* bucket = std::get_if<Bucket>(&item);
    if (bucket == nullptr) continue;
    if (bucket->kind == Kind::Join) joined_.clear();
    for (const Entry& entry : bucket->entries) learn(entry);
  }
}

void Collector::learn(const Entry& entry) {
  if (entry.is_number()) {
    require_known(entry.id, entry.count);
    for (uint32_t i = 0; i < entry.count; ++i) number(entry.id + i).apart = false;
    return;
  }
  settle(entry.name);
  if (entry.id == kNoId) return;
  // The coordinator counts its numbers up from zero, but members of a group wait for each other.
  if (entry.id > numbers_.size() + kMostNumbers)
    throw Error::internal("the plan holds an absurd number, " + std::to_string(entry.id));
  if (entry.id >= numbers_.size()) numbers_.resize(entry.id + 1);
  by_name_[entry.name] = entry.id;
}

void Collector::settle(const std::string& name) {
  if (const auto known = by_name_.find(name); known != by_name_.end()) number(known->second).apart = false;
}

Collector::Number& Collector::number(uint32_t id) {
  require_known(id, 1);
  return numbers_[id];
}

void Collector::require_known(uint32_t first, uint32_t count) const {
  if (uint64_t{first} + count > numbers_.size())
    throw Error::internal("ranks speak of the unknown number " + std::to_string(first + (count - 1)));
}

Gathered Collector::drain(double now) {
  if (held_count_ > 0 && now - looked_ >= patience_ / 4) {
    looked_ = now;
    for (uint32_t id = 0; id < numbers_.size(); ++id)
      if (!numbers_[id].asked.empty() && now - numbers_[id].since >= patience_) let_go(id);
  }
  // What all have asked for goes first: a rank may have left after it.
  Gathered up;
  std::sort(complete_.begin(), complete_.end());
  for (const uint32_t id : complete_) append(up, {kSender, true, id, 1});
  complete_.clear();
  if (up.empty()) return std::exchange(up_, {});
  up.insert(up.end(), std::make_move_iterator(up_.begin()), std::make_move_iterator(up_.end()));
  up_.clear();
  return up;
}

void hand_over(Gathered gathered, int sender, Tree& tree, Negotiator& negotiator, double now) {
  const auto from = [&](int32_t rank) {
    if (tree.holds(rank) && tree.leads(rank, sender)) return rank;
    throw Error::internal("rank " + std::to_string(sender) + " speaks for rank " + std::to_string(rank));
  };
  for (auto& item : gathered) {
    if (auto* spelled = std::get_if<Spelled>(&item)) {
      negotiator.ask(from(spelled->rank), std::move(spelled->request), now);
      continue;
    }
    const auto& numbers = std::get<Numbers>(item);
    const int32_t speaker = numbers.rank == kSender ? sender : from(numbers.rank);
    RankSet alone;
    if (!numbers.whole) alone.add(speaker);
    const RankSet& ranks = numbers.whole ? tree.below(speaker) : alone;
    for (uint32_t i = 0; i < numbers.count; ++i) negotiator.ask(ranks, numbers.first + i, now);
  }
}

}  // namespace farandole
