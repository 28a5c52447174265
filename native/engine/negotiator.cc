#include "engine/negotiator.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "engine/carried.h"

namespace farandole {
namespace {

bool same_shape(const Request& a, const Request& b) {
  if (!traits_of(a.kind).is_ragged) return a.shape == b.shape;
  return a.shape.size() == b.shape.size() && std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1);
}

std::string number_text(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

/// One property of a request: its name, the comparison of two requests, and the text of one.
struct Aspect {
  const char* what;
  bool (*alike)(const Request&, const Request&);
  std::string (*text)(const Request&);
};

constexpr Aspect kAspects[] = {
    {"operation", [](const Request& a, const Request& b) { return a.kind == b.kind; },
     [](const Request& r) -> std::string { return name_of(r.kind); }},
    {"dtype", [](const Request& a, const Request& b) { return a.dtype == b.dtype; },
     [](const Request& r) { return r.type_text(); }},
    {"shape", same_shape, [](const Request& r) { return r.type_text(); }},
    {"device", [](const Request& a, const Request& b) { return a.on_device == b.on_device; },
     [](const Request& r) -> std::string { return r.on_device ? "CUDA tensor" : "CPU tensor"; }},
    {"reduce op", [](const Request& a, const Request& b) { return a.op == b.op; },
     [](const Request& r) -> std::string { return name_of(r.op); }},
    {"scale factors",
     [](const Request& a, const Request& b) { return a.prescale == b.prescale && a.postscale == b.postscale; },
     [](const Request& r) {
       return "prescale " + number_text(r.prescale) + ", postscale " + number_text(r.postscale);
     }},
    {"root rank", [](const Request& a, const Request& b) { return a.root == b.root; },
     [](const Request& r) { return "root " + std::to_string(r.root); }},
    {"group", [](const Request& a, const Request& b) { return a.group == b.group && a.group_size == b.group_size; },
     [](const Request& r) {
       return r.group.empty() ? std::string("no group") : r.group + " of " + std::to_string(r.group_size);
     }},
};

const Request& first_of(const std::vector<std::optional<Request>>& asked) {
  return **std::find_if(asked.begin(), asked.end(), [](const auto& each) { return each.has_value(); });
}

/// A joined rank has no rows.
std::vector<int64_t> sizes_of(const std::vector<std::optional<Request>>& asked) {
  const KindTraits& traits = traits_of(first_of(asked).kind);
  const std::vector<int64_t> nothing(asked.size(), 0);
  std::vector<int64_t> sizes;
  if (!traits.is_ragged) return sizes;
  for (const auto& request : asked) {
    if (!traits.has_splits) {
      sizes.push_back(request ? request->shape[0] : 0);
      continue;
    }
    const std::vector<int64_t>& splits = request ? request->splits : nothing;
    sizes.insert(sizes.end(), splits.begin(), splits.end());
  }
  return sizes;
}

}  // namespace

std::optional<Error> disagreement(const std::vector<std::optional<Request>>& asked) {
  const Request& first = first_of(asked);
  for (const Aspect& aspect : kAspects) {
    const auto differs = [&](const std::optional<Request>& other) { return other && !aspect.alike(first, *other); };
    if (std::none_of(asked.begin(), asked.end(), differs)) continue;
    std::map<int, std::string> texts;
    for (size_t rank = 0; rank < asked.size(); ++rank)
      if (asked[rank]) texts[static_cast<int>(rank)] = aspect.text(*asked[rank]);
    return Error::mismatch(first.name, aspect.what, std::move(texts));
  }
  return std::nullopt;
}

void Negotiator::add(int rank, Request request, double now) {
  // Validated at submission already; validated again because the plan is built on it.
  validate(request, options_.size);
  now_ = now;
  if (request.kind == Kind::Join) return join(rank, request);
  RankRequests& asked = expand(request.name, now);
  std::optional<Request>& mine = asked.by_rank[static_cast<size_t>(rank)];
  if (mine) throw Error::internal("rank " + std::to_string(rank) + " requested '" + request.name + "' twice");
  const std::string name = request.name;
  mine = std::move(request);
  ++asked.count;
  if (!is_complete(asked)) {
    refuse_if_impossible(name);
    return;
  }
  RankRequests complete = std::move(asked);
  table_.erase(name);
  resolve(std::move(complete));
}

void Negotiator::add(int rank, uint32_t id, double now) {
  RankSet one;
  one.add(rank);
  add(one, id, now);
}

void Negotiator::add(int rank, uint32_t id, Bytes input, double now) {
  if (id < known_.size()) {
    Known& known = known_[id];
    if (!can_carry(known.request) || input.size() != known.request.bytes())
      throw Error::internal("rank " + std::to_string(rank) + " sent " + std::to_string(input.size()) +
                            " bytes with a request for '" + known.request.name + "'");
    known.inputs.resize(static_cast<size_t>(options_.size));
    known.inputs[static_cast<size_t>(rank)] = std::move(input);
  }
  add(rank, id, now);
}

void Negotiator::add(const RankSet& ranks, uint32_t id, double now) {
  if (id >= known_.size()) throw Error::internal("ranks requested unknown number " + std::to_string(id));
  Known& known = known_[id];
  now_ = now;
  if (known.in_full || !left_.empty() || joined_.any()) {
    known.inputs.clear();
    const Request request = known.request;  // a copy: the table of numbers may grow
    ranks.each([&](int rank) { add(rank, request, now); });
    return;
  }
  if (known.asked.empty()) {
    known.since = now;
    ++partial_;
  }
  if (known.asked.meets(ranks)) throw Error::internal("a rank requested '" + known.request.name + "' twice, by number");
  known.asked.add(ranks);
  if (known.asked.count() < static_cast<size_t>(options_.size)) return;
  known.asked.clear();
  --partial_;
  Fusible ready{known.request, {{}, id, {}}};  // all ranks know the number
  if (!known.inputs.empty()) ready.entry.result = reduce_carried(known.request, known.inputs);
  known.inputs.clear();
  release(std::move(ready));
}

bool Negotiator::is_complete(const RankRequests& asked) const {
  if (asked.count == options_.size) return true;
  if (!joined_.any()) return false;
  for (size_t rank = 0; rank < asked.by_rank.size(); ++rank)
    if (!asked.by_rank[rank] && !joined_.has(rank)) return false;
  return true;
}

void Negotiator::join(int rank, const Request& request) {
  join_name_ = request.name;
  joined_.add(rank);
  if (!left_.empty()) {
    const Loss& loss = left_.begin()->second;
    return refuse_join(Error::peer_lost(request.name, loss.named, loss.reason));
  }
  expand_all();
  std::vector<std::string> complete;
  for (const auto& [name, asked] : table_)
    if (is_complete(asked)) complete.push_back(name);
  std::sort(complete.begin(), complete.end());
  for (const std::string& name : complete) {
    RankRequests asked = std::move(table_.at(name));
    table_.erase(name);
    resolve(std::move(asked));
  }
  if (!joined_.all()) return;
  ready_.push_back({request, {request.name, kNoId, {joined_.last()}}});
  joined_.clear();
}

void Negotiator::refuse_join(Error error) {
  refused_.push_back({join_name_, std::move(error)});
  joined_.clear();
}

void Negotiator::expand_all() {
  for (Known& known : known_)
    if (!known.asked.empty()) expand(known.request.name, known.since);
}

void Negotiator::leave(const RankSet& gone, int named, const std::string& reason) {
  gone.each([&](int rank) { left_.emplace(rank, Loss{named, reason}); });
  if (joined_.any()) refuse_join(Error::peer_lost(join_name_, named, reason));
  expand_all();
  std::vector<std::string> names;
  for (const auto& [name, asked] : table_) names.push_back(name);
  for (const std::string& name : names) refuse_if_impossible(name);
}

void Negotiator::refuse_if_impossible(const std::string& name) {
  const auto at = table_.find(name);
  for (const auto& [rank, loss] : left_) {
    if (at->second.by_rank[static_cast<size_t>(rank)]) continue;
    const RankRequests asked = std::move(at->second);
    table_.erase(at);
    refuse_asked(asked, Error::peer_lost(name, loss.named, loss.reason));
    return;
  }
}

void Negotiator::refuse_asked(const RankRequests& asked, Error error) {
  const Request& first = first_of(asked.by_rank);
  if (const auto found = numbers_.find(first.name); found != numbers_.end()) known_[found->second].in_full = false;
  refuse(first, std::move(error));
}

Negotiator::RankRequests& Negotiator::expand(const std::string& name, double now) {
  const auto [at, fresh] = table_.try_emplace(name);
  RankRequests& asked = at->second;
  if (!fresh) return asked;
  asked.by_rank.resize(static_cast<size_t>(options_.size));
  asked.since = now;
  const auto number = numbers_.find(name);
  if (number == numbers_.end()) return asked;
  Known& known = known_[number->second];
  known.in_full = true;
  if (known.asked.empty()) return asked;
  known.inputs.clear();
  known.asked.each([&](int rank) { asked.by_rank[static_cast<size_t>(rank)] = known.request; });
  asked.count = static_cast<int>(known.asked.count());
  asked.since = known.since;
  known.asked.clear();
  --partial_;
  return asked;
}

void Negotiator::resolve(RankRequests asked) {
  const Request& request = first_of(asked.by_rank);
  if (const auto found = numbers_.find(request.name); found != numbers_.end()) known_[found->second].in_full = false;
  if (auto error = disagreement(asked.by_rank)) return refuse(request, std::move(*error));
  if (asked.count == options_.size) return release({request, {request.name, number(request), sizes_of(asked.by_rank)}});
  // No number: a rank without the request would not know its signature.
  if (auto error = impossible_with_joined(asked.by_rank, options_.members)) refuse(request, std::move(*error));
  else release({request, {request.name, kNoId, sizes_of(asked.by_rank), 1, request}});
}

void Negotiator::release(Fusible ready) {
  if (ready.request.group.empty()) {
    ready_.push_back(std::move(ready));
    return;
  }
  const Request request = ready.request;
  resolve_member(request, std::move(ready));
}

void Negotiator::refuse(const Request& request, Error error) {
  refused_.push_back({request.name, std::move(error)});
  if (!request.group.empty()) resolve_member(request, std::nullopt);
}

void Negotiator::resolve_member(const Request& request, std::optional<Fusible> ready) {
  Group& group = groups_[request.group];
  if (group.resolved == 0) group.since = now_;
  if (ready) group.ready.push_back(std::move(*ready));
  if (++group.resolved < request.group_size) return;
  std::move(group.ready.begin(), group.ready.end(), std::back_inserter(ready_));
  groups_.erase(request.group);
}

uint32_t Negotiator::number(const Request& request) {
  if (!request.cacheable || !traits_of(request.kind).is_numbered) return kNoId;
  const auto found = numbers_.find(request.name);
  if (found != numbers_.end() && known_[found->second].request == request) return found->second;
  // Numbers are never reused, so a number in flight keeps its meaning.
  if (known_.size() >= options_.cache_capacity) return kNoId;
  known_.push_back({request, {}, 0, false, {}});
  return numbers_[request.name] = static_cast<uint32_t>(known_.size() - 1);
}

void Negotiator::expire(double now) {
  for (Known& known : known_)
    if (!known.asked.empty() && now - known.since >= options_.timeout) expand(known.request.name, now);
  expire_groups(now);
  std::vector<RankRequests> late;
  for (auto at = table_.begin(); at != table_.end();) {
    if (now - at->second.since < options_.timeout) {
      ++at;
      continue;
    }
    late.push_back(std::move(at->second));
    at = table_.erase(at);
  }
  for (const RankRequests& asked : late) {
    std::vector<int> missing;
    std::string name;
    for (size_t rank = 0; rank < asked.by_rank.size(); ++rank) {
      if (asked.by_rank[rank]) name = asked.by_rank[rank]->name;
      else if (!joined_.has(rank)) missing.push_back(static_cast<int>(rank));
    }
    refuse_asked(asked, Error::timeout(name, std::move(missing), now - asked.since));
  }
  // A joined rank may wait for any time while the others make requests.
  if (joined_.any() && now - now_ >= options_.timeout)
    refuse_join(Error::timeout(join_name_, joined_.missing(), now - now_));
}

void Negotiator::expire_groups(double now) {
  for (auto at = groups_.begin(); at != groups_.end();) {
    const Group& group = at->second;
    if (now - group.since < options_.timeout) {
      ++at;
      continue;
    }
    // No rank requested the other members, or ranks gave different group sizes.
    for (const Fusible& ready : group.ready) {
      const std::string what = at->first + " of " + std::to_string(ready.request.group_size) + ", of which " +
                               std::to_string(group.resolved) + " came";
      std::map<int, std::string> asked;
      for (int rank = 0; rank < options_.size; ++rank) asked[rank] = what;
      refused_.push_back({ready.request.name, Error::mismatch(ready.request.name, "group", std::move(asked))});
    }
    at = groups_.erase(at);
  }
}

std::vector<Negotiator::Stall> Negotiator::stalls(double since) const {
  std::vector<Stall> found;
  const auto report = [&](const std::string& name, double begin, const auto& has_asked) {
    Stall stall{name, begin, {}, {}};
    for (int rank = 0; rank < options_.size; ++rank) {
      if (has_asked(rank)) stall.asked.push_back(rank);
      else if (!joined_.has(static_cast<size_t>(rank))) stall.missing.push_back(rank);
    }
    found.push_back(std::move(stall));
  };
  for (const Known& known : known_)
    if (!known.asked.empty() && known.since <= since)
      report(known.request.name, known.since, [&](int rank) { return known.asked.has(rank); });
  for (const auto& [name, asked] : table_)
    if (asked.since <= since)
      report(name, asked.since, [&](int rank) { return asked.by_rank[static_cast<size_t>(rank)].has_value(); });
  for (const auto& [name, group] : groups_)
    if (group.since <= since) report(name, group.since, [](int) { return true; });
  return found;
}

Plan Negotiator::decide(double now) {
  if (options_.timeout > 0 && waiting() > 0 && now - checked_ >= 0.5) {
    checked_ = now;
    expire(now);
  }
  if (ready_.empty() && refused_.empty()) return {};
  Plan plan;
  for (Refusal& refusal : refused_) plan.emplace_back(std::move(refusal));
  refused_.clear();
  for (Bucket& bucket : fuse(std::move(ready_), options_.fusion_threshold, options_.look_ahead))
    plan.emplace_back(std::move(bucket));
  ready_.clear();
  return plan;
}

}  // namespace farandole
