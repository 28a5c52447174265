#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/driver.h"
#include "engine/failure_detector.h"
#include "engine/operation.h"
#include "engine/pending.h"
#include "engine/socket_watcher.h"
#include "engine/wiring.h"
#include "transport/link.h"

namespace farandole {

inline constexpr int kAnyRank = -1;

/// One side of a message between two ranks: a send or a receive. Its request holds name, dtype and shape only.
struct Transfer : Operation {
  int peer = kAnyRank;
  uint32_t tag = 0;
  bool sends = false;

  [[nodiscard]] bool fits(int source, uint32_t of_tag) const {
    return tag == of_tag && (peer == source || peer == kAnyRank);
  }
};
using TransferPtr = std::shared_ptr<Transfer>;

/// Messages between two ranks, beside the collectives and in no order with them.
///
/// A receive takes the oldest message with its tag from its peer that no earlier receive has taken. A small message is
/// sent at once, and kept by its receiver until a receive takes it. A large one is offered, and sent into the receive's
/// tensor when that grants it. Each pair of ranks has a link for messages: two rings of the segment, or a socket.
/// All members need the driver's lock, except those marked "any thread".
class Transfers {
 public:
  /// Takes the message sockets of `wiring.remotes`. Throws Error (Internal) when one is missing.
  Transfers(Wiring& wiring, std::chrono::nanoseconds timeout, Pending& pending, Driver& driver,
            FailureDetector& failures);

  void post(const TransferPtr& transfer);  // any thread: see Engine::post()
  bool progress();                         // take posted transfers, move bytes; return whether anything moved
  void check_overdue();  // fail transfers that no rank has matched in time; throws one that is under way
  void arm_doorbell();   // make data on sockets ring this rank's doorbell
  void stop_watching() { watcher_.reset(); }
  void abandon() { static_cast<void>(watcher_.release()); }  // in a forked child: the watcher's thread is the parent's

 private:
  enum class Part : uint32_t {
    Whole,       // a small message
    Offer,       // a large transfer, of so many bytes
    Grant,       // the receiver has room for it
    Payload,     // its bytes
    Refusal,     // the receiver's tensor has another size, in `bytes`
    Withdrawal,  // the sender has given up what was granted
  };
  /// What goes over a link before the bytes of a tensor, if any.
  struct Header {
    Part part;
    uint32_t tag = 0;
    uint64_t number = 0;  // of a large transfer, as its sender counts
    uint64_t bytes = 0;
  };
  struct Outgoing {
    Header header;
    std::span<const std::byte> payload;
    TransferPtr transfer;  // complete when this is sent; null: not complete then
  };
  struct Arrival {
    int source;
    Header header;
    std::vector<std::byte> payload;
  };
  struct Peer final : Watchable {
    int rank = 0;
    std::unique_ptr<Link> link;  // null: this rank
    Signal* doorbell = nullptr;  // of a rank of this host
    std::deque<Outgoing> out;
    size_t out_at = 0;  // bytes of the first that are sent
    Header in{};
    size_t in_at = 0;                         // bytes of the header and of what follows that are received
    std::span<std::byte> room;                // for what follows the header
    std::vector<std::byte> whole;             // that room, for a small message
    std::map<uint64_t, TransferPtr> offered;  // large sends without an answer
    std::map<uint64_t, TransferPtr> granted;  // large receives under way
    uint64_t offers = 0;                      // so far
    int receives = 0;                         // from this rank, or any, that wait for a message
    std::optional<Error> lost{};

    [[nodiscard]] int fd() const override { return link ? link->fd() : -1; }
    [[nodiscard]] bool has_unsent() const override { return !out.empty(); }
    [[nodiscard]] bool is_read() const override {
      return link && !lost && (receives > 0 || !out.empty() || !offered.empty() || !granted.empty());
    }
  };

  [[nodiscard]] Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  void count_receive(const Transfer& transfer, bool more);
  bool take_posted();
  void begin_send(const TransferPtr& transfer);
  void begin_receive(const TransferPtr& transfer);
  bool serve(Peer& peer);
  bool send(Peer& peer);
  bool receive(Peer& peer);
  void begin(Peer& peer);
  void end(Peer& peer);
  void arrive(Arrival arrival);
  void deliver(const TransferPtr& transfer, Arrival& arrival);
  [[nodiscard]] TransferPtr take(std::map<uint64_t, TransferPtr>& from, uint64_t number) const;
  void part_with(Peer& peer, const Error& error);
  [[nodiscard]] bool all_lost() const;
  [[nodiscard]] Error overdue(const Transfer& transfer, uint64_t now) const;
  [[nodiscard]] Error mismatch(const Transfer& transfer, int other, uint64_t bytes) const;
  void complete(const TransferPtr& transfer);
  void fail(const TransferPtr& transfer, const Error& error);

  const Wiring& wiring_;
  const uint64_t timeout_;  // ns; 0: none
  Pending& pending_;
  Driver& driver_;
  FailureDetector& failures_;
  std::deque<Peer> peers_;          // by rank
  std::list<TransferPtr> waiting_;  // receives that wait for a transfer, in the order of their posts
  std::list<Arrival> arrived_;      // messages that wait for a receive, in the order of their arrival
  uint64_t overdue_checked_ns_ = 0;

  std::mutex posted_mu_;
  std::vector<TransferPtr> posted_;  // not taken yet

  std::unique_ptr<SocketWatcher> watcher_;  // last: its thread uses the peers
};

}  // namespace farandole
