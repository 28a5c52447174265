// Simulated ranks that send requests and receive plans along a tree: collectors, the negotiator, and messages in
// flight.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "engine/collector.h"

namespace collectors {

using namespace farandole;

inline constexpr double kMergeWait = 1;
inline constexpr double kTimeout = 10;

inline Request request_of(const std::string& name, int64_t rows = 4) {
  Request request;
  request.name = name;
  request.kind = Kind::Allreduce;
  request.dtype = DType::Float32;
  request.shape = {rows};
  request.cacheable = true;
  return request;
}

// The outcome of a name: "runs", or the error.
using Outcomes = std::map<std::string, std::string>;

inline std::string text_of(const Error& error) {
  std::string text = std::string(name_of(error.kind)) + " " + error.what_differs;
  for (const int rank : error.ranks) text += " " + std::to_string(rank);
  for (const auto& [rank, asked] : error.asked) text += " " + std::to_string(rank) + ":" + asked;
  if (error.kind == ErrorKind::PeerLost) text += " " + std::to_string(error.rank);
  return text;
}

// Ranks with their collectors, and the messages between them.
class Ranks {
 public:
  Ranks(std::vector<int> parents, unsigned seed)
      : tree_(parents), negotiator_(options(parents.size())), random_(seed), ranks_(parents.size()) {
    for (int rank = 0; rank < tree_.size(); ++rank)
      ranks_[static_cast<size_t>(rank)].collector.emplace(rank, tree_.children(rank), kMergeWait);
  }

  static Negotiator::Options options(size_t size) {
    return {.size = static_cast<int>(size), .cache_capacity = 7, .timeout = kTimeout};
  }

  void submit(int rank, const Request& request) {
    Rank& own = at(rank);
    const auto known = own.numbers.find(request.name);
    const bool by_number = known != own.numbers.end() && known->second.second == request;
    own.asked.insert(request.name);
    own.last[request.name] = request;
    const bool carries = by_number && may_carry && random_() % 2 == 0;
    if (rank == 0) {
      CollectedRequests collected;
      if (carries) collected.emplace_back(RequestWithInput{0, known->second.first, input_of(request)});
      else if (by_number) collected.emplace_back(NumberRange{0, false, known->second.first, 1});
      else collected.emplace_back(FullRequest{0, request});
      deliver(std::move(collected), 0, tree_, negotiator_, now);
      return;
    }
    if (carries) own.collector->add(RequestBatch{NumberWithInput{known->second.first, input_of(request)}}, now);
    else if (by_number) own.collector->add(RequestBatch{known->second.first}, now);
    else own.collector->add(RequestBatch{request}, now);
    if (random_() % 2 == 0) forward(rank);
  }

  void leave(int rank) {
    forward(rank);
    at(rank).up.push_back(Departure{rank, true, "it has shut down", rank});
  }

  // Moves one message by one step, if the chosen queue has one.
  void move() {
    const auto rank = static_cast<int>(random_() % ranks_.size());
    if (rank == 0) decide();
    else if (random_() % 2 == 0) forward(rank), rise(rank);
    else sink(rank);
  }

  // Delivers all messages.
  void exchange_messages() {
    for (int rounds = 0; rounds < 3 * tree_.size(); ++rounds) {
      for (int rank = 1; rank < tree_.size(); ++rank) forward(rank), rise(rank);
      decide();
      for (int rank = 1; rank < tree_.size(); ++rank)
        while (sink(rank)) {
        }
    }
  }

  Outcomes take_outcomes() { return std::exchange(outcomes_, {}); }
  [[nodiscard]] size_t messages_up() const { return messages_up_; }
  [[nodiscard]] size_t waiting() const { return negotiator_.waiting(); }
  [[nodiscard]] bool waits_for(int rank, const std::string& name) { return at(rank).asked.contains(name); }

  double now = 0;
  bool may_carry = false;  // some requests contain their inputs

 private:
  using Up = std::variant<CollectedRequests, Departure>;
  using Down = std::variant<Plan, Departure>;
  struct Rank {
    std::optional<Collector> collector;
    std::deque<Up> up;      // to its parent
    std::deque<Down> down;  // from its parent
    std::map<std::string, std::pair<uint32_t, Request>> numbers;
    std::map<std::string, Request> last;  // the last request of a name
    std::set<std::string> asked;          // and not resolved
  };

  static Bytes input_of(const Request& request) { return Bytes(request.bytes(), std::byte{1}); }

  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }

  void forward(int rank) {
    CollectedRequests collected = at(rank).collector->drain(now);
    if (collected.empty()) return;
    Bytes frame;
    encode(collected, frame);
    at(rank).up.push_back(std::get<CollectedRequests>(decode(std::span(frame).subspan(kFrameHeader))));
    ++messages_up_;
  }

  void rise(int rank) {
    if (at(rank).up.empty()) return;
    Up message = std::move(at(rank).up.front());
    at(rank).up.pop_front();
    const int parent = tree_.parent(rank);
    if (auto* collected = std::get_if<CollectedRequests>(&message)) {
      if (parent == 0) deliver(std::move(*collected), rank, tree_, negotiator_, now);
      else at(parent).collector->add(rank, std::move(*collected), now);
      return;
    }
    const auto& departure = std::get<Departure>(message);
    if (parent == 0) {
      negotiator_.leave(tree_.below(departure.rank), departure.rank, departure.reason);
      for (const int child : tree_.children(0)) at(child).down.push_back(departure);
      return;
    }
    at(parent).collector->leave();
    forward(parent);
    at(parent).up.push_back(departure);
  }

  void decide() {
    Plan plan = negotiator_.decide(now);
    if (plan.empty()) return;
    Bytes frame;
    encode(plan, frame);
    plan = std::get<Plan>(decode(std::span(frame).subspan(kFrameHeader)));
    for (const auto& item : plan) note(item);
    obey(0, plan);
  }

  void note(const Plan::value_type& item) {
    if (const auto* refusal = std::get_if<Refusal>(&item)) {
      outcomes_[refusal->name] += text_of(refusal->error);
      return;
    }
    for (const Entry& entry : std::get<Bucket>(item).entries)
      for (uint32_t i = 0; i < entry.count; ++i)
        outcomes_[entry.name.empty() ? names_.at(entry.id + i) : entry.name] += "runs";
    for (const Entry& entry : std::get<Bucket>(item).entries)
      if (!entry.name.empty() && entry.id != kNoId) names_[entry.id] = entry.name;
  }

  bool sink(int rank) {
    Rank& own = at(rank);
    if (own.down.empty()) return false;
    const Down word = std::move(own.down.front());
    own.down.pop_front();
    if (const auto* plan = std::get_if<Plan>(&word)) {
      own.collector->learn(*plan);
      obey(rank, *plan);
    } else {
      own.collector->leave();
      for (const int child : tree_.children(rank)) at(child).down.push_back(word);
    }
    return true;
  }

  void obey(int rank, const Plan& plan) {
    for (const int child : tree_.children(rank)) at(child).down.push_back(plan);
    Rank& own = at(rank);
    for (const auto& item : plan) {
      if (const auto* refusal = std::get_if<Refusal>(&item)) {
        const auto& late = refusal->error.ranks;
        if (std::find(late.begin(), late.end(), rank) == late.end()) own.asked.erase(refusal->name);
        continue;
      }
      for (const Entry& entry : std::get<Bucket>(item).entries) {
        for (uint32_t i = 0; i < entry.count; ++i) {
          const std::string& name = entry.name.empty() ? names_.at(entry.id + i) : entry.name;
          check::that(own.asked.erase(name) == 1, "the plan holds what the rank has asked for", name);
          if (!entry.name.empty() && entry.id != kNoId) own.numbers[name] = {entry.id, own.last.at(name)};
        }
      }
    }
  }

  Tree tree_;
  Negotiator negotiator_;
  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::map<uint32_t, std::string> names_;
  Outcomes outcomes_;
  size_t messages_up_ = 0;
};

}  // namespace collectors
