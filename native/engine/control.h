#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/wire.h"
#include "transport/link.h"

namespace farandole {

/// Control messages to and from one peer, over a link that takes bytes when it likes. One thread sends and receives;
/// another may send heartbeats meanwhile.
class ControlStream {
 public:
  explicit ControlStream(std::unique_ptr<Link> link) : link_(std::move(link)) {}

  [[nodiscard]] int peer() const { return link_->peer(); }
  [[nodiscard]] int fd() const { return link_->fd(); }

  template <class Payload>
  void send(const Payload& payload) {
    const std::lock_guard lock(sending_);
    encode(payload, out_);
    push();
  }

  /// The same for a message that is encoded already, for several peers.
  void send_frame(const Bytes& frame) {
    const std::lock_guard lock(sending_);
    out_.insert(out_.end(), frame.begin(), frame.end());
    push();
  }

  /// Hands waiting bytes to the link; true when none are left.
  bool flush() {
    if (!stuck()) return true;
    const std::lock_guard lock(sending_);
    return push();
  }

  /// Sends a heartbeat, unless something was sent since the last call. For a thread beside the one that drives.
  void beat();

  /// Has anything come since the last call? For the same thread.
  [[nodiscard]] bool heard() { return heard_.exchange(false, std::memory_order_relaxed); }

  /// Do bytes wait for the link to have room?
  [[nodiscard]] bool stuck() const { return waiting_.load(std::memory_order_relaxed); }

  /// The peer has been silent for too long. For the same thread.
  void give_up() { silent_.store(true); }
  [[nodiscard]] bool silent() const { return silent_.load(); }

  /// The next message that has arrived in whole.
  [[nodiscard]] std::optional<Message> receive();

  /// Why nothing more will come from the peer; messages that it sent before may still be waiting.
  [[nodiscard]] const std::optional<Error>& lost() const { return lost_; }

 private:
  bool push();
  void pull();

  std::unique_ptr<Link> link_;
  std::atomic<bool> silent_{false};
  std::atomic<bool> heard_{false};
  std::atomic<bool> waiting_{false};  // there are bytes in out_
  std::mutex sending_;                // guards the following four
  Bytes out_;
  size_t out_at_ = 0;
  bool spoke_ = false;   // since the last beat()
  bool closed_ = false;  // the peer takes nothing more
  Bytes in_;
  size_t in_at_ = 0;
  size_t in_end_ = 0;
  std::optional<Error> lost_;
};

}  // namespace farandole
