#include "engine/socket_watcher.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/clock.h"
#include "base/error.h"

namespace farandole {
namespace {

constexpr uint64_t kStop = ~uint64_t{0};

bool has_unread(int fd) {
  int bytes = 0;
  return ioctl(fd, FIONREAD, &bytes) == 0 && bytes > 0;
}

}  // namespace

SocketWatcher::SocketWatcher(std::span<Watchable* const> streams, Signal& doorbell, std::chrono::nanoseconds heartbeat)
    : doorbell_(doorbell),
      heartbeat_(static_cast<uint64_t>(heartbeat.count())),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  bool watching = epoll_.is_open() && stop_.is_open();
  const auto watch_fd = [&](int fd, uint32_t events, uint64_t place) {
    watching = watching && control(EPOLL_CTL_ADD, fd, events, place);
  };
  watch_fd(stop_.get(), EPOLLIN, kStop);
  for (Watchable* stream : streams) {
    if (stream->fd() < 0) continue;
    watch_fd(stream->fd(), EPOLLONESHOT, watched_.size());
    watched_.emplace_back(*stream, Silence(heartbeat_));
  }
  if (!watching) throw Error::internal(std::string("cannot watch sockets: ") + std::strerror(errno));
  thread_ = std::thread(&SocketWatcher::watch, this);
}

SocketWatcher::~SocketWatcher() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

bool SocketWatcher::control(int change, int fd, uint32_t events, uint64_t place) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = place;
  return epoll_ctl(epoll_.get(), change, fd, &event) == 0;
}

void SocketWatcher::listen() {
  for (uint64_t place = 0; place < watched_.size(); ++place) {
    Watched& each = watched_[place];
    // An ended stream would ring for ever.
    if (each.ended.load() || !each.stream->is_read() || (each.listening.load() && !each.stream->has_unsent())) continue;
    each.listening.store(true);
    uint32_t news = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
    if (each.stream->has_unsent()) news |= EPOLLOUT;
    if (!control(EPOLL_CTL_MOD, each.stream->fd(), news, place))
      throw Error::internal(std::string("cannot watch a socket: ") + std::strerror(errno));
  }
}

void SocketWatcher::watch() noexcept {
  std::array<epoll_event, 16> events;
  for (;;) {
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), milliseconds_to_sleep(now_ns()));
    if (count < 0 && errno != EINTR) return;
    const uint64_t now = now_ns();
    for (Watched& each : watched_) {
      each.silence.look(now);
      if (each.stream->has_received()) each.silence.note_life();
    }
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kStop) return;
      Watched& each = watched_[event.data.u64];
      each.listening.store(false);
      if ((event.events & EPOLLIN) != 0) each.silence.note_life();
      // Reading reports the end.
      if ((event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) each.ended.store(true);
    }
    if (count > 0) doorbell_.bump();
    if (heartbeat_ != 0) look(now);
  }
}

void SocketWatcher::look(uint64_t now) {
  for (Watched& each : watched_) {
    if (each.ended.load() || !each.silence.is_over_limit()) continue;
    if (has_unread(each.stream->fd())) {
      // This rank is not listening, so the peer may lack room to send.
      each.silence.note_life();
      continue;
    }
    each.ended.store(true);
    each.stream->mark_silent();
    doorbell_.bump();
  }
  if (now < next_beat_) return;
  // Streams used since the last time are skipped, so that each carries a sign of life per quarter of the limit.
  next_beat_ = now + heartbeat_ / 8;
  for (const Watched& each : watched_) each.stream->send_heartbeat();
}

int SocketWatcher::milliseconds_to_sleep(uint64_t now) const {
  if (heartbeat_ == 0) return -1;
  uint64_t ns = next_beat_ > now ? next_beat_ - now : 0;
  for (const Watched& each : watched_)
    if (!each.ended.load()) ns = std::min(ns, each.silence.left());
  return static_cast<int>((ns + 999'999) / 1'000'000);
}

}  // namespace farandole
