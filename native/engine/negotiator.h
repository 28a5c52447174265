#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/fusion.h"
#include "engine/joined.h"
#include "engine/plan.h"
#include "engine/rank_set.h"
#include "engine/request.h"

namespace farandole {

/// Decides which operations run; pure, without clocks, threads or sockets. Only the coordinator, rank 0, has one.
///
/// Ranks make requests in any order and at any time. A request that all ranks have made alike is ready. Requests that
/// differ are refused, with each rank's version. Ready operations are fused and returned as a plan, with the results of
/// those whose requests have all carried their inputs. A joined rank counts as having made every request, until all
/// have joined.
class Negotiator {
 public:
  struct Options {
    int size = 1;
    size_t fusion_threshold = size_t{128} << 20;  // bytes per bucket; 0 switches fusion off
    size_t cache_capacity = 16384;                // names that get a number
    double timeout = 0;          // seconds until an operation fails that not all ranks request; 0 = never
    bool look_ahead = true;      // fusion looks past operations of another type
    std::vector<int> members{};  // of a process set: the job's numbers of its ranks
  };

  explicit Negotiator(Options options) : options_(std::move(options)), joined_(options_.size) {}

  /// Adds a request of `rank` at time `now` (seconds, any epoch). Throws Error (Internal) for a repeated request.
  void add(int rank, Request request, double now);

  /// Adds a request by number. Throws Error (Internal) for an unknown number.
  void add(int rank, uint32_t id, double now);

  /// Adds a request by number with its input. Throws Error (Internal) for an input that does not fit the number.
  void add(int rank, uint32_t id, Bytes input, double now);

  /// Adds a request of several ranks at once, at a cost that hardly depends on their count.
  void add(const RankSet& ranks, uint32_t id, double now);

  /// Notes that the ranks `gone` have left, after their last requests. Operations that lack a request of theirs are
  /// refused, now and later. The error names `named`: the others may be cut off because it left.
  void leave(const RankSet& gone, int named, const std::string& reason);

  /// Limits the bytes of a bucket from the next plan on.
  void limit_buckets(size_t fusion_threshold) { options_.fusion_threshold = fusion_threshold; }

  /// Returns the operations that became ready or failed since the last call.
  [[nodiscard]] Plan decide(double now);

  /// An operation that some ranks have requested, and others not.
  struct Stall {
    std::string name;  // or a group's, if no rank has requested some of its members; then no rank is missing
    double since;
    std::vector<int> asked, missing;
  };
  /// Returns the operations first requested before `since`.
  [[nodiscard]] std::vector<Stall> stalls(double since) const;

  /// The number of operations requested by some ranks only, and of incomplete groups.
  [[nodiscard]] size_t waiting() const { return table_.size() + partial_ + groups_.size() + (joined_.any() ? 1 : 0); }

 private:
  /// The full requests for one name, by rank.
  struct RankRequests {
    std::vector<std::optional<Request>> by_rank;
    int count = 0;
    double since = 0;
  };
  /// A signature with a number, and the ranks that requested it by number. Once a rank sends its request in full, all
  /// of them move to the table.
  struct Known {
    Request request;
    RankSet asked;
    double since = 0;
    bool in_full = false;
    std::vector<Bytes> inputs{};  // by rank, as far as requests have carried them
  };
  struct Group {
    std::vector<Fusible> ready;
    uint32_t resolved = 0;
    double since = 0;
  };

  struct Loss {
    int named;
    std::string reason;
  };

  void join(int rank, const Request& request);
  /// Returns whether every rank has made the request or joined.
  [[nodiscard]] bool is_complete(const RankRequests& asked) const;
  /// Moves all numbered requests to the table, which knows the missing ranks. Nothing is complete by number from now
  /// on.
  void expand_all();
  void refuse_join(Error error);
  /// Refuses the operation if it lacks a request of a rank that has left.
  void refuse_if_impossible(const std::string& name);
  void refuse_asked(const RankRequests& asked, Error error);
  RankRequests& expand(const std::string& name, double now);
  void resolve(RankRequests asked);
  void release(Fusible ready);
  void refuse(const Request& request, Error error);
  /// Counts a member of a group as ready or refused; the last one releases the group.
  void resolve_member(const Request& request, std::optional<Fusible> ready);
  void expire(double now);
  void expire_groups(double now);
  [[nodiscard]] uint32_t number(const Request& request);

  Options options_;
  std::unordered_map<std::string, RankRequests> table_;
  std::vector<Known> known_;                           // by number
  std::unordered_map<std::string, uint32_t> numbers_;  // by name
  std::unordered_map<std::string, Group> groups_;
  std::vector<Fusible> ready_;
  std::vector<Refusal> refused_;
  std::map<int, Loss> left_;
  Joined joined_;
  std::string join_name_;  // the name of the ranks' join
  size_t partial_ = 0;     // numbers requested by some ranks only
  double now_ = 0;         // of the latest request
  double checked_ = 0;     // when expiry was last checked
};

/// Returns how the requests for one name differ, if they do; joined ranks may have none.
[[nodiscard]] std::optional<Error> disagreement(const std::vector<std::optional<Request>>& asked);

}  // namespace farandole
