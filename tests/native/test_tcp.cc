// A link over a socket: sending, receiving, and its end.
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <system_error>
#include <vector>

#include "base/descriptor.h"
#include "link_ranks.h"
#include "transport/tcp.h"

namespace {

using check::Wire;
using farandole::Error;
using farandole::ErrorKind;
using farandole::TcpLink;

std::array<int, 2> pair_of(Wire wire) { return wire == Wire::Tcp ? check::tcp_pair() : check::unix_pair(); }

std::vector<std::byte> pattern(size_t bytes) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 31 + i / 251);
  return data;
}

void wait_readable(const TcpLink& link) {
  pollfd entry{link.fd(), POLLIN, 0};
  CHECK_EQ(::poll(&entry, 1, 5000), 1);
}

void bytes_arrive_in_order_and_a_full_link_takes_none(Wire wire) {
  const auto fds = pair_of(wire);
  TcpLink a(1, fds[0]);
  TcpLink b(0, fds[1]);
  CHECK_EQ(a.peer(), 1);
  std::array<std::byte, 16> none{};
  CHECK_EQ(b.try_recv(none), 0U);
  CHECK_EQ(b.try_recv({}), 0U);
  CHECK_EQ(a.try_send({}), 0U);

  // Twice the largest socket buffer.
  const auto sent = pattern(64 << 20);
  size_t taken = 0;
  while (const size_t now = a.try_send(std::span(sent).subspan(taken))) taken += now;
  CHECK(taken > 0 && taken < sent.size());

  std::vector<std::byte> got(sent.size());
  size_t read = 0;
  while (read < sent.size()) {
    read += b.try_recv(std::span(got).subspan(read));
    if (taken < sent.size()) taken += a.try_send(std::span(sent).subspan(taken));
  }
  CHECK(got == sent);
}

void the_end_comes_after_all_that_was_sent(Wire wire) {
  const auto fds = pair_of(wire);
  TcpLink b(7, fds[1]);
  const auto sent = pattern(1000);
  {
    TcpLink a(0, fds[0]);
    CHECK_EQ(a.try_send(sent), sent.size());
  }
  std::vector<std::byte> got(1000);
  size_t read = 0;
  while (read < got.size()) {
    wait_readable(b);
    read += b.try_recv(std::span(got).subspan(read, std::min<size_t>(300, got.size() - read)));
  }
  CHECK(got == sent);
  wait_readable(b);
  const Error error = CHECK_THROWS(Error, b.try_recv(got));
  CHECK(error.kind == ErrorKind::PeerLost);
  CHECK_EQ(error.rank, 7);
  CHECK_EQ(error.reason, "closed the connection");
}

void sending_to_the_gone_is_an_error(Wire wire) {
  const auto fds = pair_of(wire);
  TcpLink b(3, fds[1]);
  ::close(fds[0]);
  const auto sent = pattern(100);
  // A closed TCP socket answers the first bytes by a reset, so the error may come a moment later.
  const Error error = check::thrown<Error>([&] {
    for (int i = 0; i < 5000; ++i) {
      (void)b.try_send(sent);
      pollfd entry{b.fd(), 0, 0};
      ::poll(&entry, 1, 1);
    }
  });
  CHECK(error.kind == ErrorKind::PeerLost);
  CHECK_EQ(error.rank, 3);
}

void a_reset_is_an_error() {
  const auto fds = check::tcp_pair();
  TcpLink b(2, fds[1]);
  const linger hard{1, 0};
  CHECK_EQ(::setsockopt(fds[0], SOL_SOCKET, SO_LINGER, &hard, sizeof hard), 0);
  ::close(fds[0]);
  wait_readable(b);
  std::array<std::byte, 4> got{};
  const Error error = CHECK_THROWS(Error, b.try_recv(got));
  CHECK(error.kind == ErrorKind::PeerLost);
  CHECK_EQ(error.rank, 2);
  CHECK_EQ(error.reason, "connection reset");
}

void last_words_arrive_although_the_peer_had_not_listened(Wire wire) {
  const auto fds = pair_of(wire);
  TcpLink b(1, fds[1]);
  const auto words = pattern(2000);
  CHECK_EQ(b.try_send(words), words.size());
  {
    TcpLink a(0, fds[0]);
    wait_readable(a);
    CHECK_EQ(a.try_send(words), words.size());
  }
  std::vector<std::byte> got(words.size() + 1);
  wait_readable(b);
  CHECK_EQ(b.try_recv(got), words.size());
  wait_readable(b);
  CHECK_EQ(check::thrown<Error>([&] { (void)b.try_recv(got); }).reason, "closed the connection");
}

void the_descriptor_is_owned() {
  const auto fds = check::unix_pair();
  {
    TcpLink a(0, fds[0]);
    CHECK_EQ(a.fd(), fds[0]);
    CHECK((::fcntl(fds[0], F_GETFL) & O_NONBLOCK) != 0);
  }
  CHECK_EQ(::fcntl(fds[0], F_GETFD), -1);
  ::close(fds[1]);

  std::array<int, 2> pipe_fds{};
  CHECK_EQ(::pipe(pipe_fds.data()), 0);
  check::thrown<Error>([&] { TcpLink(0, pipe_fds[0]); });
  CHECK_EQ(::fcntl(pipe_fds[0], F_GETFD), -1);
  ::close(pipe_fds[1]);
  check::thrown<Error>([&] { TcpLink(0, -1); });
}

void forked_children_have_no_part_in_it() {
  const auto fds = check::unix_pair();
  std::optional<TcpLink> a(std::in_place, 1, fds[0]);
  TcpLink b(0, fds[1]);
  const auto words = pattern(100);
  CHECK_EQ(b.try_send(words), words.size());
  std::array<int, 2> alive{};
  CHECK_EQ(::pipe(alive.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(alive[1]);
    // The child does not get the parent's bytes, and its descriptor's number is not free for something else.
    std::array<std::byte, 100> got{};
    const bool apart = ::recv(fds[0], got.data(), got.size(), MSG_DONTWAIT) < 0 && ::fcntl(fds[0], F_GETFD) >= 0;
    a.reset();
    static_cast<void>(::read(alive[0], got.data(), 1));  // until the parent has checked
    ::_exit(apart ? 0 : 1);
  }
  ::close(alive[0]);
  std::vector<std::byte> got(words.size());
  CHECK_EQ(a->try_recv(got), words.size());
  a.reset();
  wait_readable(b);
  CHECK_EQ(check::thrown<Error>([&] { (void)b.try_recv(got); }).reason, "closed the connection");
  ::close(alive[1]);
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

void a_lack_of_descriptors_is_named() {
#ifdef __SANITIZE_ADDRESS__
  return;  // the sanitizer itself needs free descriptors to look at the error
#endif
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const farandole::Descriptor first(::dup(2));
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(first.get()) + 4;
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto exhaust = [&] {
    std::vector<farandole::Descriptor> all;
    while (all.size() < few.rlim_cur) all.push_back(first.duplicate());
  };
  const auto error = check::thrown<std::system_error>(exhaust);
  CHECK_EQ(error.code().value(), EMFILE);
  check::that(std::string(error.what()).find("ulimit -n") != std::string::npos, "the remedy is named", error.what());
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace

int main() {
  for (const Wire wire : {Wire::Unix, Wire::Tcp}) {
    bytes_arrive_in_order_and_a_full_link_takes_none(wire);
    the_end_comes_after_all_that_was_sent(wire);
    sending_to_the_gone_is_an_error(wire);
    last_words_arrive_although_the_peer_had_not_listened(wire);
  }
  a_reset_is_an_error();
  the_descriptor_is_owned();
  forked_children_have_no_part_in_it();
  a_lack_of_descriptors_is_named();
  return check::report();
}
