#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/collector.h"
#include "engine/control.h"
#include "engine/doorman.h"
#include "engine/negotiator.h"
#include "engine/pending.h"
#include "engine/trace.h"
#include "engine/tree.h"
#include "engine/wiring.h"

namespace farandole {

/// A plan that this rank has heard.
struct AgreedPlan {
  Plan plan;
  uint64_t heard = 0;  // Trace::now() then
  bool paced = false;  // on rank 0: mark the steps that follow the plan's knobs
};

/// Requests and plans on their way through the tree of control connections.
///
/// Requests go up to rank 0, which decides; plans come down. News of ranks that leave go both ways. All members need
/// the driver's lock, except those marked "any thread".
class ControlTree {
 public:
  /// Takes the control sockets of `wiring.remotes`. Throws Error (Internal) when one is missing.
  ControlTree(Wiring& wiring, const EngineOptions& options, Pending& pending, const Trace& trace);

  // The first three return whether anything moved.
  bool ask();      // pass on what this rank has asked for since the last call
  bool hear();     // read all messages that have come; throws the failure that a peer announces
  bool decide();   // on rank 0: decide what runs next
  void forward();  // on other ranks: send up what the ranks below have asked for
  void flush();    // send what waits for room in the links
  [[nodiscard]] std::optional<AgreedPlan> next_plan();  // none: all that were heard have run
  [[nodiscard]] bool has_plans() const { return !plans_.empty(); }

  void note_departure(int rank);              // `rank` of this host has shut down
  [[nodiscard]] bool has_departures() const;  // neighbours have left of which other ranks must hear
  [[nodiscard]] bool has_left(int rank) const { return left_[static_cast<size_t>(rank)]; }

  /// Tell the other ranks of departures. All that the departed neighbours have sent must have been heard. Throws
  /// PeerLost when this rank waits for operations and has lost its way to the coordinator.
  void announce_departures();
  void announce_failure(const Farewell& farewell);                                    // to the ranks of other hosts
  [[nodiscard]] const std::optional<Error>& announced() const { return announced_; }  // the failure, by a peer

  /// Send what waits for room; with `clean`, also that this rank has done its part and leaves. Gives up at `deadline`.
  void leave(bool clean, uint64_t deadline);

  void arm_doorbell();  // let news on sockets ring this rank's doorbell
  void stop_watching() { doorman_.reset(); }
  void abandon() { static_cast<void>(doorman_.release()); }  // in a forked child: the watching thread is the parent's

  /// With peers on other hosts a rank must listen and report losses even when it has no operations.
  [[nodiscard]] bool has_remote_peers() const { return has_remote_peers_; }
  [[nodiscard]] const std::deque<ControlStream>& streams() const { return streams_; }

  /// Any thread: let a coming plan carry `knobs` to all ranks. Throws Error (Invalid) for wrong knobs, and on other
  /// ranks than 0.
  void turn(const Knobs& knobs, bool paced);
  [[nodiscard]] bool is_turning() const { return turning_.load(); }  // any thread: knobs wait for a plan

  /// Any thread: operations that some ranks have asked for longer ago than the stall limit, and others not.
  [[nodiscard]] std::vector<Negotiator::Stall> stalls();

  struct Asked {
    uint64_t by_number = 0;
    uint64_t in_full = 0;
  };
  [[nodiscard]] Asked asked();  // any thread: requests sent so far

 private:
  void connect(int peer);
  [[nodiscard]] bool is_parent(int peer) const { return !wiring_.leads() && peer == tree_.parent(wiring_.rank); }
  void handle(int sender, Gathered gathered);
  void handle(int sender, Plan plan);
  void handle(int sender, const Farewell& farewell);
  void adopt(Plan plan, bool paced);
  bool add_knobs(Plan& plan);
  void announce_departure(int rank, int first);
  void find_stalls(double now);
  template <class Payload>
  void send_to_children(const Payload& payload);

  Wiring& wiring_;
  Pending& pending_;
  const Trace& trace_;
  const double stall_;  // seconds
  Tree tree_;
  Negotiator negotiator_;              // used by rank 0 only
  Collector collector_;                // used by all others
  std::deque<ControlStream> streams_;  // to the parent (first; rank 0 has none), and to the children
  bool has_remote_peers_ = false;
  std::deque<AgreedPlan> plans_;
  std::vector<bool> left_;         // by rank: it has shut down after doing its part
  std::vector<bool> told_;         // by rank: those that must hear that it has left have been told
  std::optional<int> first_left_;  // the rank that left first, as far as is known here
  std::optional<Error> announced_;
  double stalls_looked_ = 0;  // when stalls were last looked for

  std::mutex mu_;  // guards what follows
  Asked asked_;
  std::vector<Negotiator::Stall> stalls_;
  std::optional<Knobs> wanted_;  // for the next plan with a bucket
  bool wanted_paced_ = false;
  std::atomic<bool> turning_{false};  // wanted_ is set

  std::unique_ptr<Doorman> doorman_;  // last: its thread uses the streams
};

}  // namespace farandole
