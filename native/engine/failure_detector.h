#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/control_tree.h"
#include "engine/driver.h"
#include "engine/pending.h"
#include "engine/silence.h"
#include "engine/wiring.h"
#include "transport/guard.h"
#include "transport/tcp.h"

namespace farandole {

/// Detection of lost ranks, which ends the job.
///
/// The life word in the segment shows the death of a rank of this host; its sockets and its silence show that of a rank
/// of another host. Once poisoned, the engine gives every operation, present and future, the same error. All members
/// need the driver's lock, except those marked "any thread".
class FailureDetector final : public Guard {
 public:
  FailureDetector(const Wiring& wiring, const EngineOptions& options, Pending& pending, ControlTree& control,
                  Driver& driver);

  void watch(const WiredWorld& wired);  // cut off a peer that acknowledges no data; look for deaths that a wait misses
  void start_timeout(uint64_t now);     // of the operation that starts

  /// Guard of waits inside collectives: receive messages, and throw when the wait cannot succeed.
  void check() override;
  [[nodiscard]] bool has_left(int rank) const override { return control_.has_left(rank); }
  [[nodiscard]] bool spins_briefly() const override { return driver_.is_in_background(); }

  /// Return the error that explains `error`, which a collective has thrown. A peer may have ended only because a third
  /// rank was lost, and a library that carries the data does not name ranks. Waits up to 0.4 s for a report of the
  /// loss.
  [[nodiscard]] Error root_cause(const Error& error);

  /// Check life words, connections and overdue operations between operations; return the loss that was found. Throws
  /// when another rank has ended the job.
  [[nodiscard]] std::optional<Error> find_lost();

  /// End the job with `error`; only the first call counts. Announces it to all ranks, and fails pending operations.
  void poison(const Error& error) noexcept;
  void fail_pending(const Error& error);
  [[nodiscard]] bool has_failed() const { return failed_.load(); }  // any thread: the engine is poisoned
  void require_alive() const;  // any thread: throw the failure that has ended the job
  /// Any thread: return whether `error` says that a rank has left in order, perhaps this one.
  [[nodiscard]] bool has_left(const Error& error) const;

 private:
  [[nodiscard]] std::string reason_of(Abort::Reason reason) const;
  [[nodiscard]] Abort abort_of(const Error& error) const;
  [[nodiscard]] Departure departure_of(const Error& error, const Abort& why) const;
  [[nodiscard]] Error lost(int rank, Abort::Reason reason) const;
  [[nodiscard]] std::optional<Error> aborted() const;
  [[nodiscard]] std::optional<Error> dead_local() const;
  [[nodiscard]] std::optional<Error> lost_remote() const;
  [[nodiscard]] std::vector<int> stopped() const;
  void check_overdue();
  void check_timeout(uint64_t now) const;
  void check_links(uint64_t now);

  struct WatchedLink {
    const TcpLink* link;
    Silence silence;  // of the peer's acknowledgements
  };

  const Wiring& wiring_;
  const std::chrono::nanoseconds heartbeat_;
  const std::chrono::nanoseconds timeout_;
  Pending& pending_;
  ControlTree& control_;
  Driver& driver_;
  std::vector<WatchedLink> links_;
  bool looks_for_dead_ = false;      // waits of the world do not notice dead ranks of this host
  uint64_t links_checked_ns_ = 0;    // when the links were last checked
  uint64_t overdue_checked_ns_ = 0;  // when overdue operations were last searched
  uint64_t deadline_ns_ = 0;         // of the running operation; 0: none
  std::atomic<bool> failed_{false};
};

}  // namespace farandole
