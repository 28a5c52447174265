#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace farandole {
namespace {

std::atomic<uint32_t> forks{0};

}  // namespace

uint32_t fork_number() noexcept {
  static const int counting = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(counting);
  return forks.load(std::memory_order_relaxed);
}

}  // namespace farandole
