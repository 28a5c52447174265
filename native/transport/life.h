#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace farandole {

/// Shows to the other processes of the host whether a rank lives.
///
/// The owner holds a robust mutex for as long as it lives. When its process dies the kernel marks the mutex' lock word
/// before it tears the memory down, so that even the death of a process of many gigabytes is seen at once, without a
/// thread and without a system call. (An end-of-file on a socket comes only after the memory is gone: ~80 ms per GB.)
class alignas(128) Life {
 public:
  enum class State : uint32_t { Absent = 0, Alive = 1, Left = 2, Dead = 3 };

  /// Called once by the creator of the segment.
  void prepare();

  /// Called by the owning thread, which must live as long as the rank.
  void begin();

  /// Called by the owning thread: a clean goodbye.
  void end();

  [[nodiscard]] State state() const;

  /// Is the owner's process stopped, by a signal or a debugger? Asks the system: not for a hot path.
  [[nodiscard]] bool is_stopped() const;

 private:
  [[nodiscard]] uint32_t word() const;  // of the mutex, as the kernel sees it

  pthread_mutex_t alive_;
  std::atomic<uint32_t> state_;
};

/// The reason that a `PeerLost` gives for a peer in this state.
inline const char* reason_of(Life::State state) {
  return state == Life::State::Left ? "it has shut down" : "its process was killed or crashed";
}

}  // namespace farandole
