#pragma once

#include <cstddef>
#include <span>

namespace farandole {

/// An ordered, reliable, non-blocking byte stream to and from one peer.
class Link {
 public:
  /// `peer` is the index in the mesh; `rank` is the number for errors, where it differs.
  explicit Link(int peer) : Link(peer, peer) {}
  Link(int peer, int rank) : peer_(peer), rank_(rank) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Returns the number of bytes taken; 0 when sending would block. Throws `Error::peer_lost` when the peer is lost.
  [[nodiscard]] virtual size_t try_send(std::span<const std::byte> bytes) = 0;

  /// Returns the number of bytes read; 0 when there are none. Throws `Error::peer_lost` when the peer is lost and all
  /// of its bytes have been read.
  [[nodiscard]] virtual size_t try_recv(std::span<std::byte> bytes) = 0;

  /// The descriptor to poll; -1 for a link through memory.
  [[nodiscard]] virtual int fd() const = 0;

  [[nodiscard]] int peer() const { return peer_; }
  [[nodiscard]] int rank() const { return rank_; }

 private:
  int peer_;
  int rank_;
};

}  // namespace farandole
