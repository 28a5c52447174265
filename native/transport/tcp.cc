#include "transport/tcp.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <system_error>

#include "base/error.h"

namespace farandole {
namespace {

std::string text_of(int code) { return std::generic_category().message(code); }

Error lost(int rank, int code) {
  switch (code) {
    case ECONNRESET: return Error::peer_lost("", rank, "connection reset");
    case EPIPE: return Error::peer_lost("", rank, "closed the connection");
    default: return Error::peer_lost("", rank, "connection failed: " + text_of(code));
  }
}

void set(int fd, int level, int option, int value) {
  if (::setsockopt(fd, level, option, &value, sizeof value) != 0)
    throw Error::internal("setsockopt(" + std::to_string(option) + ") failed: " + text_of(errno));
}

void configure(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
    throw Error::internal("file descriptor " + std::to_string(fd) + " cannot be made non-blocking: " + text_of(errno));
  int domain = 0;
  socklen_t size = sizeof domain;
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0)
    throw Error::internal("file descriptor " + std::to_string(fd) + " is no socket: " + text_of(errno));
  if (domain == AF_UNIX) return;
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // Not TCP_USER_TIMEOUT: it also ends a connection to a live peer that has not read for that long.
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

}  // namespace

TcpLink::TcpLink(int peer, int fd, int rank) : Link(peer, rank), fd_(fd) {
  try {
    configure(fd);
    own_.emplace(fd);
  } catch (...) {
    ::close(fd);
    throw;
  }
}

TcpLink::~TcpLink() {
  // Closing a socket with unread bytes sends a reset, which may discard our last bytes in transit.
  std::array<std::byte, 16 << 10> unread;
  for (int reads = 0; reads < 64 && ::recv(fd_, unread.data(), unread.size(), MSG_DONTWAIT) > 0; ++reads) {
  }
  own_.reset();  // before the number is reused
  ::close(fd_);
}

bool TcpLink::is_unanswered() const {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;  // not TCP
  return (info.tcpi_unacked > 0 && info.tcpi_retransmits > 0) || info.tcpi_probes > 0;
}

size_t TcpLink::try_send(std::span<const std::byte> bytes) {
  for (;;) {
    const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return static_cast<size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return 0;
    if (errno != EINTR) throw lost(rank(), errno);
  }
}

size_t TcpLink::try_recv(std::span<std::byte> bytes) {
  // recv() of 0 bytes returns 0, which would look like the end of the stream.
  if (bytes.empty()) return 0;
  for (;;) {
    const ssize_t got = ::recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) return static_cast<size_t>(got);
    if (got == 0) throw lost(rank(), EPIPE);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) throw lost(rank(), errno);
  }
}

}  // namespace farandole
