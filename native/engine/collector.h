#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/negotiator.h"
#include "engine/pending.h"
#include "engine/plan.h"
#include "engine/rank_set.h"
#include "engine/tree.h"
#include "engine/wire.h"

namespace farandole {

/// Merges the numbered requests of a subtree: one message goes up once all of its ranks have made a request. Pure,
/// without clocks, threads or sockets. Every rank but the coordinator has one.
///
/// Every request goes up exactly once. It is held back only while a merge is likely. It goes up separately, with its
/// rank, when it carries its input, a rank below sends the same name in full or sent its own request separately, a rank
/// has left, a rank below has joined, or other ranks are late (the coordinator then names the missing ones).
class Collector {
 public:
  /// `merge_wait` is the longest time in seconds that a request is held back.
  Collector(int rank, const std::vector<int>& children, double merge_wait);

  /// Adds requests of this rank at time `now` (seconds, any epoch). Throws Error (Internal) for an unknown number or a
  /// repeated request.
  void add(const RequestBatch& batch, double now);

  /// Adds requests that a child has sent.
  void add(int child, CollectedRequests collected, double now);

  /// Notes that a rank has left. No request can be complete any more, so all held requests go up at once.
  void leave();

  /// Reads a plan on its way down: new numbers, and the requests that it resolves.
  void learn(const Plan& plan);

  /// Returns the requests to send up now.
  [[nodiscard]] CollectedRequests drain(double now);

  /// Returns whether no request is held or ready to be sent.
  [[nodiscard]] bool idle() const { return complete_.empty() && up_.empty() && held_count_ == 0; }

 private:
  struct Number {
    RankSet asked;  // places in members_
    double since = 0;
    bool unmerged = false;  // send requests separately until a plan resolves it
  };

  void add(size_t place, uint32_t id, double now);
  void forward(const NumberRange& numbers);
  void forward(FullRequest full);
  void forward(RequestWithInput carrying);
  void send_up(size_t place, uint32_t id);
  void stop_merging(uint32_t id);
  void send_separately(uint32_t id);
  void send_all_separately();
  void merge_again(const std::string& name);
  void learn(const Entry& entry);
  [[nodiscard]] Number& number(uint32_t id);
  void require_known(uint32_t first, uint32_t count) const;

  std::vector<int> members_;                // this rank, then its children
  std::unordered_map<int, size_t> places_;  // child -> place in members_
  double merge_wait_;
  std::vector<Number> numbers_;
  std::unordered_map<std::string, uint32_t> by_name_;
  std::vector<uint32_t> complete_;  // numbers that all members have requested
  CollectedRequests up_;
  size_t held_count_ = 0;    // numbers that only some members have requested
  double checked_ = 0;       // when late members were last checked for
  bool incomplete_ = false;  // a rank has left
  std::string joined_;       // the name under which ranks below have joined; empty if none has
};

/// Passes the requests that `sender`, a child of rank 0 in `tree`, has sent to the coordinator's negotiator.
void deliver(CollectedRequests collected, int sender, Tree& tree, Negotiator& negotiator, double now);

}  // namespace farandole
