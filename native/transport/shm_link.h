#pragma once

#include "transport/link.h"
#include "transport/segment.h"

namespace farandole {

/// A link through two byte rings of a segment. With `ring_bell`, sending signals the peer's doorbell.
class ShmLink : public Link {
 public:
  ShmLink(int peer, RankArea& peer_area, Ring& out, Ring& in, bool ring_bell)
      : Link(peer), peer_area_(peer_area), out_(out), in_(in), ring_bell_(ring_bell) {}

  [[nodiscard]] size_t try_send(std::span<const std::byte> bytes) override;
  [[nodiscard]] size_t try_recv(std::span<std::byte> bytes) override;
  [[nodiscard]] int fd() const override { return -1; }

 private:
  RankArea& peer_area_;
  Ring& out_;
  Ring& in_;
  bool ring_bell_;
};

}  // namespace farandole
