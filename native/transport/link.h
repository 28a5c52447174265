#pragma once

#include <cstddef>
#include <span>

namespace farandole {

/// Bytes to and from one peer: ordered, reliable, never blocking.
class Link {
 public:
  /// `peer` is its place in the mesh; `rank` what errors call it, where that differs.
  explicit Link(int peer) : Link(peer, peer) {}
  Link(int peer, int rank) : peer_(peer), rank_(rank) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Returns how many bytes were taken; 0 when sending would block. Throws `Error::peer_lost` when the peer is gone.
  [[nodiscard]] virtual size_t try_send(std::span<const std::byte> bytes) = 0;

  /// Returns how many bytes were read; 0 when there are none. Throws `Error::peer_lost` when the peer is gone and
  /// all that it sent has been read.
  [[nodiscard]] virtual size_t try_recv(std::span<std::byte> bytes) = 0;

  /// The descriptor to poll, or -1 for a link through memory.
  [[nodiscard]] virtual int fd() const = 0;

  [[nodiscard]] int peer() const { return peer_; }
  [[nodiscard]] int rank() const { return rank_; }

 private:
  int peer_;
  int rank_;
};

}  // namespace farandole
