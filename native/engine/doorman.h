#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <thread>

#include "engine/control.h"
#include "engine/silence.h"
#include "transport/futex.h"

namespace farandole {

/// Rings a doorbell when one of some control streams has news: the driver sleeps on memory, remote peers write to
/// sockets. While the driver is awake it looks by itself, and a thread that woke at every arrival would be in its way.
///
/// It also keeps the peers sure of this rank, by a heartbeat on each stream that carries nothing else, and notices when
/// one of them falls silent. All that on a thread of its own, because the driver may be busy with a long operation.
class Doorman {
 public:
  /// Watches those of `streams` that have a socket; they must stay until the destructor returns. `heartbeat` is the
  /// longest silence of a peer that lives; 0 switches heartbeats off.
  Doorman(std::deque<ControlStream>& streams, Signal& doorbell, std::chrono::nanoseconds heartbeat);
  ~Doorman();
  /// Rings once for each stream that has news from now on, or has them already. To be called by who drives, when
  /// nothing moves any more and before it sleeps; costs nothing for streams that have not rung since the last call.
  void listen();

  Doorman(const Doorman&) = delete;
  Doorman& operator=(const Doorman&) = delete;

 private:
  struct Watched {
    Watched(ControlStream& stream, Silence silence) : stream(&stream), silence(silence) {}
    ControlStream* stream;
    Silence silence;
    std::atomic<bool> ended{false};      // the peer has closed its end, or is known to be silent
    std::atomic<bool> listening{false};  // it rings at the next news
  };

  [[nodiscard]] bool control(int change, int fd, uint32_t events, uint64_t place) const;
  void watch() noexcept;
  void look(uint64_t now);
  [[nodiscard]] int milliseconds_to_sleep(uint64_t now) const;

  std::deque<Watched> watched_;
  Signal& doorbell_;
  uint64_t heartbeat_;  // ns
  uint64_t next_beat_ = 0;
  int epoll_;
  int stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace farandole
