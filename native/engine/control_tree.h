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
#include "engine/negotiator.h"
#include "engine/pending.h"
#include "engine/socket_watcher.h"
#include "engine/trace.h"
#include "engine/tree.h"
#include "engine/wiring.h"

namespace farandole {

/// A plan that this rank has received.
struct AgreedPlan {
  Plan plan;
  uint64_t received_at = 0;  // Trace::now()
  bool paced = false;        // on rank 0: mark the steps that follow the plan's knobs
};

/// Transport of requests and plans over the tree of control connections.
///
/// Requests go up to rank 0, which decides; plans come down. Reports of departures go both ways. All members need the
/// driver's lock, except those marked "any thread".
class ControlTree {
 public:
  /// Takes the control sockets of `wiring.remotes`. Throws Error (Internal) when one is missing.
  ControlTree(Wiring& wiring, const EngineOptions& options, Pending& pending, const Trace& trace);

  // The first three return whether anything moved.
  bool send_requests();                                 // send the requests that this rank made since the last call
  bool receive();                                       // read all messages; throws a failure that a peer announces
  bool decide();                                        // on rank 0: decide what runs next
  void forward();                                       // on other ranks: send up the requests of the ranks below
  void flush();                                         // send bytes that wait for room in the links
  [[nodiscard]] std::optional<AgreedPlan> next_plan();  // none if all received plans have run
  [[nodiscard]] bool has_plans() const { return !plans_.empty(); }

  void note_departure(int rank);              // `rank` of this host has shut down
  [[nodiscard]] bool has_departures() const;  // other ranks must learn of a neighbour's departure
  [[nodiscard]] bool has_left(int rank) const { return left_[static_cast<size_t>(rank)]; }

  /// Announce departures to the other ranks. Receive all messages of the departed neighbours first. Throws PeerLost
  /// when this rank has pending operations and has lost its path to the coordinator.
  void announce_departures();
  void announce_failure(const Departure& departure);  // to the ranks of other hosts
  [[nodiscard]] const std::optional<Error>& announced() const {
    return announced_;
  }  // the failure that a peer announced

  /// Send unsent bytes and, with `clean`, that this rank has done its part and leaves. Gives up at `deadline`.
  void leave(bool clean, uint64_t deadline);

  void arm_doorbell();  // make data on sockets ring this rank's doorbell
  void stop_watching() { watcher_.reset(); }
  void abandon() { static_cast<void>(watcher_.release()); }  // in a forked child: the watcher's thread is the parent's

  /// A rank with peers on other hosts must receive and report losses even without operations.
  [[nodiscard]] bool has_remote_peers() const { return has_remote_peers_; }
  [[nodiscard]] const std::deque<ControlStream>& streams() const { return streams_; }

  /// Any thread: send `knobs` to all ranks with a later plan. Throws Error (Invalid) for invalid knobs, and on other
  /// ranks than 0.
  void turn(const Knobs& knobs, bool paced);
  [[nodiscard]] bool is_turning() const { return turning_.load(); }  // any thread: knobs wait for a plan

  /// Any thread: operations that some ranks requested longer ago than the stall limit, and others have not.
  [[nodiscard]] std::vector<Negotiator::Stall> stalls();

  struct RequestCounts {
    uint64_t by_number = 0;
    uint64_t in_full = 0;
  };
  [[nodiscard]] RequestCounts request_counts();  // any thread: requests sent so far

 private:
  void connect(int peer);
  [[nodiscard]] bool is_parent(int peer) const {
    return !wiring_.is_coordinator() && peer == tree_.parent(wiring_.rank);
  }
  void handle(int sender, CollectedRequests collected);
  void handle(int sender, Plan plan);
  void handle(int sender, const Departure& departure);
  void adopt(Plan plan, bool paced);
  bool add_knobs(Plan& plan);
  void announce_departure(int rank, int first);
  void find_stalls(double now);
  template <class Payload>
  void send_to_children(const Payload& payload);

  Wiring& wiring_;
  Pending& pending_;
  const Trace& trace_;
  const double stall_, timeout_;  // seconds
  const bool carries_;            // requests for small reductions contain their inputs
  Tree tree_;
  Negotiator negotiator_;              // used by rank 0 only
  Collector collector_;                // used by all other ranks
  std::deque<ControlStream> streams_;  // to the parent (first; rank 0 has none), and to the children
  bool has_remote_peers_ = false;
  std::deque<AgreedPlan> plans_;
  std::vector<bool> left_;                 // by rank: it has left after doing its part
  std::vector<bool> departure_announced_;  // by rank: its departure was announced
  std::optional<int> first_left_;          // the rank that left first, as far as this rank knows
  std::optional<Error> announced_;
  double stalls_checked_ = 0;  // when stalls were last searched

  std::mutex mu_;  // guards the members below
  RequestCounts request_counts_;
  std::vector<Negotiator::Stall> stalls_;
  std::optional<Knobs> wanted_;  // for the next plan with a bucket
  bool wanted_paced_ = false;
  std::atomic<bool> turning_{false};  // wanted_ is set

  std::unique_ptr<SocketWatcher> watcher_;  // last: its thread uses the streams
};

}  // namespace farandole
