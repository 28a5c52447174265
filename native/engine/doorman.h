#pragma once

#include <span>
#include <thread>

#include "transport/futex.h"

namespace farandole {

/// Rings a doorbell when one of some sockets has news: the driver sleeps on memory, remote peers write to sockets.
class Doorman {
 public:
  /// Watches `fds`, which must stay open until the destructor returns.
  Doorman(std::span<const int> fds, Signal& doorbell);
  ~Doorman();
  Doorman(const Doorman&) = delete;
  Doorman& operator=(const Doorman&) = delete;

 private:
  void watch() noexcept;

  Signal& doorbell_;
  int epoll_;
  int stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace farandole
