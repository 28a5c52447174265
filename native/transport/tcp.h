#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "base/fork.h"
#include "transport/link.h"

namespace farandole {

/// A link over a connected stream socket (TCP, or AF_UNIX between the processes of one host).
///
/// A peer that closes or resets the connection is lost. A host that vanishes without a word is noticed after about half
/// a minute of silence while we wait for it (keepalive); a peer that lives but is late is not: that is the guard's
/// matter. Forked children have no part in it, so that it ends with this process.
class TcpLink final : public Link {
 public:
  /// Takes ownership of `fd`, connected and authenticated, and makes it non-blocking. Throws `Error` when it is no
  /// socket; `fd` is closed then too.
  TcpLink(int peer, int fd) : TcpLink(peer, fd, peer) {}
  TcpLink(int peer, int fd, int rank);
  ~TcpLink() override;

  [[nodiscard]] size_t try_send(std::span<const std::byte> bytes) override;
  [[nodiscard]] size_t try_recv(std::span<std::byte> bytes) override;
  [[nodiscard]] int fd() const override { return fd_; }

  /// Has the peer's kernel acknowledged nothing since what we sent was sent again, or its full buffer was asked after?
  /// A peer that lives but does not read is not meant. Asks the system: not for a hot path.
  [[nodiscard]] bool is_unanswered() const;

 private:
  int fd_;
  std::optional<NotForChildren> own_;
};

}  // namespace farandole
