#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/fusion.h"
#include "engine/joined.h"
#include "engine/plan.h"
#include "engine/rank_set.h"
#include "engine/request.h"

namespace farandole {

/// Decides what runs: pure, without clocks, threads or sockets. Lives at the coordinator, rank 0.
///
/// Ranks ask in any order and at any time. What all ranks have asked for, alike, is ready; what they have asked for
/// differently is refused, naming who asked for what. Ready operations are fused and leave as a plan. A rank that has
/// joined counts as having asked for everything, until all have joined.
class Negotiator {
 public:
  struct Options {
    int size = 1;
    size_t fusion_threshold = size_t{128} << 20;  // bytes per bucket; 0 switches fusion off
    size_t cache_capacity = 16384;                // names with a number
    double timeout = 0;      // seconds until an operation that not all ranks ask for fails; 0 = never
    bool look_ahead = true;  // fusion looks past operations of another type
  };

  explicit Negotiator(Options options) : options_(options), joined_(options.size) {}

  /// `rank` asks at time `now` (seconds, any epoch). Throws Error (Internal) when it asks twice.
  void ask(int rank, Request request, double now);

  /// The same by number, for a signature that was given one. Throws Error (Internal) for an unknown number.
  void ask(int rank, uint32_t id, double now);

  /// The same for several ranks at once, at a cost that hardly depends on how many they are.
  void ask(const RankSet& ranks, uint32_t id, double now);

  /// `gone` have left for good, after their last requests: what still lacks a request of theirs is refused, now and
  /// later. `named` is the rank that the error names: the others may be cut off by its leaving.
  void leave(const RankSet& gone, int named, const std::string& reason);

  /// From the next plan on buckets hold at most so many bytes.
  void limit_buckets(size_t fusion_threshold) { options_.fusion_threshold = fusion_threshold; }

  /// What has become ready or failed since the last call.
  [[nodiscard]] Plan decide(double now);

  /// An operation that some ranks have asked for, and others not.
  struct Stall {
    std::string name;  // or a group's, of which no rank has asked for some members: then none is missing
    double since;
    std::vector<int> asked, missing;
  };
  /// What was asked for first before `since`.
  [[nodiscard]] std::vector<Stall> stalls(double since) const;

  /// Operations that some ranks have asked for and others not, and groups that are incomplete.
  [[nodiscard]] size_t waiting() const { return table_.size() + partial_ + groups_.size() + (joined_.any() ? 1 : 0); }

 private:
  /// Who asked for a name, with the request in full.
  struct Asked {
    std::vector<std::optional<Request>> by_rank;
    int count = 0;
    double since = 0;
  };
  /// A signature with a number, and who asked by it. Once a rank spells its request out, all move to the table.
  struct Known {
    Request request;
    RankSet asked;
    double since = 0;
    bool spelled_out = false;
  };
  struct Group {
    std::vector<Fusible> ready;
    uint32_t settled = 0;
    double since = 0;
  };

  struct Loss {
    int named;
    std::string reason;
  };

  void join(int rank, const Request& request);
  /// All ranks have asked for it, or have joined.
  [[nodiscard]] bool is_complete(const Asked& asked) const;
  /// From now on nothing becomes ready by number; the table knows who lacks what.
  void spell_out_all();
  void refuse_join(Error error);
  /// Refuses what waits for a rank that has left.
  void refuse_if_hopeless(const std::string& name);
  void refuse_asked(const Asked& asked, Error error);
  Asked& spell_out(const std::string& name, double now);
  void settle(Asked asked);
  void release(Fusible ready);
  void refuse(const Request& request, Error error);
  /// One more member of a group is ready or refused; the last one sets the group free.
  void settle_member(const Request& request, std::optional<Fusible> ready);
  void expire(double now);
  void expire_groups(double now);
  [[nodiscard]] uint32_t number(const Request& request);

  Options options_;
  std::unordered_map<std::string, Asked> table_;
  std::vector<Known> known_;                           // by number
  std::unordered_map<std::string, uint32_t> numbers_;  // by name
  std::unordered_map<std::string, Group> groups_;
  std::vector<Fusible> ready_;
  std::vector<Refusal> refused_;
  std::map<int, Loss> left_;
  Joined joined_;
  std::string join_name_;  // what the ranks call it
  size_t partial_ = 0;     // numbers that some ranks have asked for and others not
  double now_ = 0;         // of the latest request
  double looked_ = 0;      // when expiry was last checked
};

/// How the requests for one name differ, if they do; ranks that have joined may have none.
[[nodiscard]] std::optional<Error> disagreement(const std::vector<std::optional<Request>>& asked);

}  // namespace farandole
