#include "engine/doorman.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

namespace farandole {

Doorman::Doorman(std::span<const int> fds, Signal& doorbell)
    : doorbell_(doorbell), epoll_(epoll_create1(EPOLL_CLOEXEC)), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  bool watching = epoll_ >= 0 && stop_ >= 0;
  const auto watch_fd = [&](int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    watching = watching && epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0;
  };
  watch_fd(stop_, EPOLLIN);
  // Edge-triggered: one ring per arrival, whether or not anybody reads yet.
  for (const int fd : fds) watch_fd(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
  if (!watching) {
    const std::string why = std::strerror(errno);
    if (epoll_ >= 0) close(epoll_);
    if (stop_ >= 0) close(stop_);
    throw Error::internal("cannot watch the control sockets: " + why);
  }
  thread_ = std::thread(&Doorman::watch, this);
}

Doorman::~Doorman() {
  eventfd_write(stop_, 1);
  thread_.join();
  close(epoll_);
  close(stop_);
}

void Doorman::watch() noexcept {
  std::array<epoll_event, 16> events;
  for (;;) {
    const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < count; ++i)
      if (events[static_cast<size_t>(i)].data.fd == stop_) return;
    if (count > 0) doorbell_.bump();
    if (count < 0 && errno != EINTR) return;
  }
}

}  // namespace farandole
