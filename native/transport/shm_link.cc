#include "transport/shm_link.h"

#include "base/error.h"

namespace farandole {

size_t ShmLink::try_send(std::span<const std::byte> bytes) {
  const size_t sent = out_.push(bytes);
  if (sent > 0 && ring_bell_) peer_area_.doorbell.bump();
  // A lost peer will never make room.
  if (sent == 0 && !bytes.empty()) {
    const Life::State state = peer_area_.life.state();
    if (state == Life::State::Dead || state == Life::State::Left) throw Error::peer_lost("", peer(), reason_of(state));
  }
  return sent;
}

size_t ShmLink::try_recv(std::span<std::byte> bytes) {
  size_t got = in_.pop(bytes);
  if (got > 0 || bytes.empty()) return got;
  const Life::State state = peer_area_.life.state();
  if (state != Life::State::Dead && state != Life::State::Left) return 0;
  got = in_.pop(bytes);  // bytes from before its end
  if (got == 0) throw Error::peer_lost("", peer(), reason_of(state));
  return got;
}

}  // namespace farandole
