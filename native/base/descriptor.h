// A file descriptor with one owner.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace farandole {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  [[nodiscard]] bool is_open() const { return fd_ >= 0; }

  [[nodiscard]] int get() const { return fd_; }

  // A duplicate of the descriptor. Throws std::system_error if the process has no descriptor left.
  [[nodiscard]] Descriptor duplicate() const {
    Descriptor made(fcntl(fd_, F_DUPFD_CLOEXEC, 0));
    if (!made.is_open())
      throw std::system_error(errno, std::generic_category(),
                              "a second use of a connection; raise the limit on open files (ulimit -n)");
    return made;
  }

  // Returns the descriptor; the caller must close it.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace farandole
