#include "transport/life.h"

#include <linux/futex.h>

#include <cerrno>
#include <fstream>
#include <string>

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
  // Never contended: every rank has its own mutex, and a segment serves one generation of ranks.
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
  // The kernel sets this when the owner's thread is gone.
  const bool died = (word() & FUTEX_OWNER_DIED) != 0;
  // The owner may have left between the two loads.
  if (died && static_cast<State>(state_.load(std::memory_order_acquire)) != State::Left) return State::Dead;
  return State::Alive;
}

uint32_t Life::word() const {
  // glibc keeps the futex word first.
  return reinterpret_cast<const std::atomic<uint32_t>*>(&alive_)->load(std::memory_order_relaxed);
}

bool Life::is_stopped() const {
  // "TID (any name) STATE ...". In another PID namespace the file is missing, or belongs to an unrelated process.
  std::ifstream file("/proc/" + std::to_string(word() & FUTEX_TID_MASK) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");
  return name_end != std::string::npos && (line[name_end + 2] == 'T' || line[name_end + 2] == 't');
}

}  // namespace farandole
