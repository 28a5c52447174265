#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <thread>

#include "base/descriptor.h"
#include "engine/control.h"
#include "engine/silence.h"
#include "transport/futex.h"

namespace farandole {

/// Watches the sockets of control streams and rings a doorbell for new data: the driver sleeps on memory, remote peers
/// write to sockets. While the driver is awake it reads the sockets itself, and the watcher does not ring.
///
/// It also sends heartbeats on idle streams and detects silent peers. It has its own thread, because the driver may be
/// busy with a long operation.
class SocketWatcher {
 public:
  /// Watches the streams that have a socket; they must outlive the watcher. `heartbeat` is the longest silence of a
  /// live peer; 0 disables heartbeats.
  SocketWatcher(std::deque<ControlStream>& streams, Signal& doorbell, std::chrono::nanoseconds heartbeat);
  ~SocketWatcher();
  /// Makes each stream ring once, when data arrives or if unread data is there already. The driver calls it when
  /// nothing moves any more and before it sleeps. Free for streams that have not rung since the last call.
  void listen();

  SocketWatcher(const SocketWatcher&) = delete;
  SocketWatcher& operator=(const SocketWatcher&) = delete;

 private:
  struct Watched {
    Watched(ControlStream& stream, Silence silence) : stream(&stream), silence(silence) {}
    ControlStream* stream;
    Silence silence;
    std::atomic<bool> ended{false};      // the peer has closed its end, or is silent
    std::atomic<bool> listening{false};  // it rings when data arrives
  };

  [[nodiscard]] bool control(int change, int fd, uint32_t events, uint64_t place) const;
  void watch() noexcept;
  void look(uint64_t now);
  [[nodiscard]] int milliseconds_to_sleep(uint64_t now) const;

  std::deque<Watched> watched_;
  Signal& doorbell_;
  uint64_t heartbeat_;  // ns
  uint64_t next_beat_ = 0;
  Descriptor epoll_;
  Descriptor stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace farandole
