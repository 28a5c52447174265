#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <span>
#include <thread>

#include "base/descriptor.h"
#include "engine/silence.h"
#include "transport/futex.h"

namespace farandole {

/// A stream to one peer that a watcher can watch.
class Watchable {
 public:
  virtual ~Watchable() = default;

  /// The descriptor to poll; -1 for a stream through memory.
  [[nodiscard]] virtual int fd() const = 0;
  /// Returns whether bytes wait for room in the stream.
  [[nodiscard]] virtual bool has_unsent() const = 0;
  /// Returns whether the driver reads the stream now. Unread data of another stream does not ring.
  [[nodiscard]] virtual bool is_read() const { return true; }

  // For watchers with a heartbeat. They call these in their own thread.
  /// Returns whether anything was received since the last call.
  [[nodiscard]] virtual bool has_received() { return false; }
  /// Sends a heartbeat unless something was sent since the last call.
  virtual void send_heartbeat() {}
  /// Notes that the peer has been silent for too long.
  virtual void mark_silent() {}
};

/// Watches the sockets of streams and rings a doorbell for new data: the driver sleeps on memory, remote peers
/// write to sockets. While the driver is awake it reads the sockets itself, and the watcher does not ring.
///
/// It also sends heartbeats on idle streams and detects silent peers. It has its own thread, because the driver may be
/// busy with a long operation.
class SocketWatcher {
 public:
  /// Watches the streams that have a socket; they must outlive the watcher. `heartbeat` is the longest silence of a
  /// live peer; 0 disables heartbeats.
  SocketWatcher(std::span<Watchable* const> streams, Signal& doorbell, std::chrono::nanoseconds heartbeat);
  ~SocketWatcher();
  /// Makes each stream ring once, when data arrives or if unread data is there already. The driver calls it when
  /// nothing moves any more and before it sleeps. Free for streams that have not rung since the last call.
  void listen();

  SocketWatcher(const SocketWatcher&) = delete;
  SocketWatcher& operator=(const SocketWatcher&) = delete;

 private:
  struct Watched {
    Watched(Watchable& stream, Silence silence) : stream(&stream), silence(silence) {}
    Watchable* stream;
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
