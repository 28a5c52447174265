// Ranks as threads over real sockets: a body written for one rank runs on N.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "check.h"
#include "transport/guard.h"
#include "transport/mesh.h"
#include "transport/tcp.h"

namespace check {

enum class Wire { Unix, Tcp };

/// The numbers of ranks that a body runs on. A few ranks suffice to show a race, and ThreadSanitizer slows every rank.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kSlow = true;
inline const std::vector<int> kSizes{1, 2, 3, 5};
#else
inline constexpr bool kSlow = false;
inline const std::vector<int> kSizes{1, 2, 3, 4, 5, 6, 7, 8};
#endif

inline const char* name_of(Wire wire) { return wire == Wire::Unix ? "unix" : "tcp"; }

inline int must(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

inline std::array<int, 2> tcp_pair() {
  const int listener = must(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  must(::bind(listener, reinterpret_cast<sockaddr*>(&address), size), "bind");
  must(::listen(listener, 1), "listen");
  must(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), "getsockname");
  const int client = must(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
  must(::connect(client, reinterpret_cast<sockaddr*>(&address), size), "connect");
  const int server = must(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), "accept");
  ::close(listener);
  return {client, server};
}

inline std::array<int, 2> unix_pair() {
  std::array<int, 2> fds{};
  must(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()), "socketpair");
  return fds;
}

/// Ends every wait after a limit.
class Deadline final : public farandole::Guard {
 public:
  explicit Deadline(std::chrono::milliseconds limit) : limit_(limit), end_(std::chrono::steady_clock::now() + limit) {}

  /// Begins the time anew. Not while a rank waits.
  void renew() { end_ = std::chrono::steady_clock::now() + limit_; }

  /// Says that `rank` has left in order.
  void note_departure(int rank) { left_ = rank; }
  [[nodiscard]] bool has_left(int rank) const override { return rank == left_; }

  void check() override {
    if (std::chrono::steady_clock::now() > end_)
      throw farandole::Error::timeout("", {}, std::chrono::duration<double>(limit_).count());
  }

 private:
  std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point end_;
  std::atomic<int> left_{-1};
};

/// Fully connected ranks of one test. All links live until the last rank has finished, unless a body drops its own.
class Ranks {
 public:
  using Body = std::function<void(farandole::Mesh&)>;

  explicit Ranks(int size, Wire wire = Wire::Unix, std::chrono::milliseconds limit = std::chrono::seconds(60))
      : size_(size) {
    std::vector<std::vector<std::unique_ptr<farandole::Link>>> links(static_cast<size_t>(size));
    for (auto& row : links) row.resize(static_cast<size_t>(size));
    for (size_t a = 0; a < links.size(); ++a) {
      for (size_t b = a + 1; b < links.size(); ++b) {
        const auto fds = wire == Wire::Tcp ? tcp_pair() : unix_pair();
        links[a][b] = std::make_unique<farandole::TcpLink>(static_cast<int>(b), fds[0]);
        links[b][a] = std::make_unique<farandole::TcpLink>(static_cast<int>(a), fds[1]);
      }
    }
    // With more threads than cores, a long spin would only delay the others.
    const farandole::WaitPolicy policy{std::chrono::microseconds(5)};
    for (int rank = 0; rank < size; ++rank) {
      guards_.push_back(std::make_unique<Deadline>(limit));
      meshes_.push_back(std::make_unique<farandole::Mesh>(rank, std::move(links[static_cast<size_t>(rank)]),
                                                          *guards_.back(), policy));
    }
  }

  [[nodiscard]] int size() const { return size_; }

  /// Closes all links of `rank`, like its death.
  void drop(int rank) { meshes_[static_cast<size_t>(rank)].reset(); }

  /// The same, but the others know that it has left in order.
  void leave(int rank) {
    for (const auto& guard : guards_) guard->note_departure(rank);
    drop(rank);
  }

  /// Runs `body` on every rank; returns each rank's exception. The deadline is that of one run.
  std::vector<std::optional<farandole::Error>> run(const Body& body) {
    for (const auto& guard : guards_) guard->renew();
    std::vector<std::optional<farandole::Error>> errors(static_cast<size_t>(size_));
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < errors.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(*meshes_[rank]);
        } catch (const farandole::Error& error) {
          errors[rank] = error;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  /// The same, for bodies that must not fail.
  void must_run(const Body& body, const std::string& context = "") {
    const auto errors = run(body);
    for (size_t rank = 0; rank < errors.size(); ++rank)
      that(!errors[rank].has_value(), "no error",
           context + " rank " + std::to_string(rank) + (errors[rank] ? std::string(": ") + errors[rank]->what() : ""));
  }

 private:
  int size_;
  std::vector<std::unique_ptr<Deadline>> guards_;
  std::vector<std::unique_ptr<farandole::Mesh>> meshes_;
};

}  // namespace check
