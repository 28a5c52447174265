#include "transport/life.h"

#include <linux/futex.h>

#include <cerrno>

#include "base/error.h"

namespace farandole {

void Life::prepare() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&alive_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  state_.store(static_cast<uint32_t>(State::Absent), std::memory_order_release);
}

void Life::begin() {
  // Never contended: every rank has a mutex of its own, and a segment serves one generation of ranks.
  if (const int status = pthread_mutex_trylock(&alive_); status != 0)
    throw Error::internal("the life word of this rank is taken (errno " + std::to_string(status) + ")");
  state_.store(static_cast<uint32_t>(State::Alive), std::memory_order_release);
}

void Life::end() {
  state_.store(static_cast<uint32_t>(State::Left), std::memory_order_release);
  pthread_mutex_unlock(&alive_);
}

Life::State Life::state() const {
  const auto state = static_cast<State>(state_.load(std::memory_order_acquire));
  if (state != State::Alive) return state;
  // glibc keeps the futex word first; the kernel sets FUTEX_OWNER_DIED in it when the owner's thread is gone.
  const auto* word = reinterpret_cast<const std::atomic<uint32_t>*>(&alive_);
  const bool died = (word->load(std::memory_order_relaxed) & FUTEX_OWNER_DIED) != 0;
  // The owner may have said goodbye between the two looks.
  if (died && static_cast<State>(state_.load(std::memory_order_acquire)) != State::Left) return State::Dead;
  return State::Alive;
}

}  // namespace farandole
