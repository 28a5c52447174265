#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace farandole {

/// Life word of a rank, which the other processes of the host read.
///
/// The owner holds a robust mutex while it lives. When its process dies, the kernel marks the mutex before it frees the
/// process' memory. The death of a process of many gigabytes is therefore visible at once, without a thread or a system
/// call. An end-of-file on a socket comes only after the memory is freed (~80 ms per GB).
class alignas(128) Life {
 public:
  enum class State : uint32_t { Absent = 0, Alive = 1, Left = 2, Dead = 3 };

  /// Initializes the word; called once, by the creator of the segment.
  void prepare();

  /// Marks the rank alive. Call it on the owning thread, which must live as long as the rank.
  void begin();

  /// Marks the rank as left. Call it on the owning thread.
  void end();

  [[nodiscard]] State state() const;

  /// Returns whether a signal or a debugger has stopped the owner's process. Makes system calls, so not for a hot path.
  [[nodiscard]] bool is_stopped() const;

 private:
  [[nodiscard]] uint32_t word() const;  // the mutex' futex word

  pthread_mutex_t alive_;
  std::atomic<uint32_t> state_;
};

/// The `reason` of a `PeerLost` for a peer in this state.
inline const char* reason_of(Life::State state) {
  return state == Life::State::Left ? "it has shut down" : "its process was killed or crashed";
}

}  // namespace farandole
