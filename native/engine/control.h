#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/wire.h"
#include "transport/link.h"

namespace farandole {

/// Control messages to and from one peer, over a link that takes bytes when it likes.
class ControlStream {
 public:
  explicit ControlStream(std::unique_ptr<Link> link) : link_(std::move(link)) {}

  [[nodiscard]] int peer() const { return link_->peer(); }
  [[nodiscard]] int fd() const { return link_->fd(); }

  template <class Payload>
  void send(const Payload& payload) {
    encode(payload, out_);
    flush();
  }

  /// The same for a message that is encoded already, for several peers.
  void send_frame(const Bytes& frame) {
    out_.insert(out_.end(), frame.begin(), frame.end());
    flush();
  }

  /// Hands waiting bytes to the link; true when none are left.
  bool flush();

  /// The next message that has arrived in whole.
  [[nodiscard]] std::optional<Message> receive();

  /// Why nothing more will come from the peer; messages that it sent before may still be waiting.
  [[nodiscard]] const std::optional<Error>& lost() const { return lost_; }

 private:
  void pull();

  std::unique_ptr<Link> link_;
  Bytes out_;
  size_t out_at_ = 0;
  Bytes in_;
  size_t in_at_ = 0;
  size_t in_end_ = 0;
  std::optional<Error> lost_;
  bool closed_ = false;  // the peer takes nothing more
};

}  // namespace farandole
