#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/socket_watcher.h"
#include "engine/wire.h"
#include "transport/link.h"

namespace farandole {

/// Control messages to and from one peer, over a non-blocking link. One thread sends and receives; another may send
/// heartbeats at the same time.
class ControlStream final : public Watchable {
 public:
  explicit ControlStream(std::unique_ptr<Link> link) : link_(std::move(link)) {}

  [[nodiscard]] int peer() const { return link_->peer(); }
  [[nodiscard]] int fd() const override { return link_->fd(); }

  template <class Payload>
  void send(const Payload& payload) {
    const std::lock_guard lock(sending_);
    encode(payload, out_);
    push();
  }

  /// Sends a message that is encoded already, for several peers.
  void send_frame(const Bytes& frame) {
    const std::lock_guard lock(sending_);
    out_.insert(out_.end(), frame.begin(), frame.end());
    push();
  }

  /// Passes unsent bytes to the link; returns whether none are left.
  bool flush() {
    if (!has_unsent()) return true;
    const std::lock_guard lock(sending_);
    return push();
  }

  void send_heartbeat() override;
  [[nodiscard]] bool has_received() override { return received_.exchange(false, std::memory_order_relaxed); }

  [[nodiscard]] bool has_unsent() const override { return waiting_.load(std::memory_order_relaxed); }

  void mark_silent() override { silent_.store(true); }
  [[nodiscard]] bool silent() const { return silent_.load(); }

  /// Returns the next complete message.
  [[nodiscard]] std::optional<Message> receive();

  /// The error that ended the stream; messages from before it may still be unread.
  [[nodiscard]] const std::optional<Error>& lost() const { return lost_; }

 private:
  bool push();
  void pull();

  std::unique_ptr<Link> link_;
  std::atomic<bool> silent_{false};
  std::atomic<bool> received_{false};
  std::atomic<bool> waiting_{false};  // out_ is not empty
  std::mutex sending_;                // guards the four members below
  Bytes out_;
  size_t out_at_ = 0;
  bool sent_ = false;    // since the last send_heartbeat()
  bool closed_ = false;  // the peer accepts no more bytes
  Bytes in_;
  size_t in_at_ = 0;
  size_t in_end_ = 0;
  std::optional<Error> lost_;
};

}  // namespace farandole
