#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "base/fork.h"
#include "transport/link.h"

namespace farandole {

/// A link over a connected stream socket: TCP, or AF_UNIX between processes of one host.
///
/// A peer that closes or resets the connection is lost. Keepalive notices a vanished host after about half a minute of
/// silence during a wait. The guard, not the link, decides about a live but slow peer. Forked children do not inherit
/// the connection, so it ends with this process.
class TcpLink final : public Link {
 public:
  /// Takes ownership of the connected, authenticated `fd` and makes it non-blocking. Throws `Error` when `fd` is not a
  /// socket, and closes it.
  TcpLink(int peer, int fd) : TcpLink(peer, fd, peer) {}
  TcpLink(int peer, int fd, int rank);
  ~TcpLink() override;

  [[nodiscard]] size_t try_send(std::span<const std::byte> bytes) override;
  [[nodiscard]] size_t try_recv(std::span<std::byte> bytes) override;
  [[nodiscard]] int fd() const override { return fd_; }

  /// Returns whether the peer's kernel has acknowledged nothing since data was retransmitted or its full buffer was
  /// probed. False for a peer that lives but does not read. Makes a system call, so not for a hot path.
  [[nodiscard]] bool is_unanswered() const;

 private:
  int fd_;
  std::optional<NotForChildren> own_;
};

}  // namespace farandole
