#include "base/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace farandole {
namespace {

/// State of this process that forked children replace.
struct Own {
  std::atomic<uint32_t> forks{0};
  std::mutex mu;
  std::vector<int> sockets;

  Own() {
    // Hold the lock across fork(), so that the child gets a consistent list and owns the lock.
    pthread_atfork([] { only().mu.lock(); }, [] { only().mu.unlock(); }, [] { only().become_child(); });
  }

  /// Never destroyed: links may outlive static objects.
  static Own& only() {
    static Own& own = *new Own;
    return own;
  }

  /// Calls only functions that are safe between fork() and exec().
  void become_child() noexcept {
    forks.fetch_add(1, std::memory_order_relaxed);
    const int nothing = sockets.empty() ? -1 : eventfd(0, EFD_CLOEXEC);
    // Without a free descriptor the copies stay open, and only the heartbeat notices the end of this process.
    if (nothing >= 0) {
      for (const int fd : sockets) dup3(nothing, fd, O_CLOEXEC);
      close(nothing);
    }
    mu.unlock();
  }
};

}  // namespace

uint32_t fork_number() noexcept { return Own::only().forks.load(std::memory_order_relaxed); }

NotForChildren::NotForChildren(int fd) : fd_(fd) {
  Own& own = Own::only();
  const std::lock_guard lock(own.mu);
  own.sockets.push_back(fd);
}

NotForChildren::~NotForChildren() {
  Own& own = Own::only();
  const std::lock_guard lock(own.mu);
  own.sockets.erase(std::ranges::find(own.sockets, fd_));
}

}  // namespace farandole
