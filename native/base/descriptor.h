// A file descriptor with one owner.
#pragma once

#include <fcntl.h>
#include <unistd.h>

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

  // A duplicate of the descriptor; closed if the process has no descriptor left.
  [[nodiscard]] Descriptor duplicate() const { return Descriptor(fcntl(fd_, F_DUPFD_CLOEXEC, 0)); }

  // Returns the descriptor; the caller must close it.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace farandole
