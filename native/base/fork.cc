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

/// What this process has that its children do not share.
struct Own {
  std::atomic<uint32_t> forks{0};
  std::mutex mu;
  std::vector<int> sockets;

  Own() {
    // Held while the process is forked, so that the child finds the list whole and the lock its own.
    pthread_atfork([] { only().mu.lock(); }, [] { only().mu.unlock(); }, [] { only().become_child(); });
  }

  /// Never destroyed: links may outlive static objects.
  static Own& only() {
    static Own& own = *new Own;
    return own;
  }

  /// Calls nothing but what is safe between fork() and exec().
  void become_child() noexcept {
    forks.fetch_add(1, std::memory_order_relaxed);
    const int nothing = sockets.empty() ? -1 : eventfd(0, EFD_CLOEXEC);
    // Without a descriptor to spare the copies stay: then the heartbeat has to tell of this process' end.
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
