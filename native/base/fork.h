#pragma once

#include <cstdint>

namespace farandole {

/// A number that differs between a parent and its forked child. Compare it to find out whether an object was made by
/// this process. Costs a load; getpid() would cost a system call.
[[nodiscard]] uint32_t fork_number() noexcept;

/// Keeps a socket out of forked children while it lives. Otherwise a child that outlives this process would hold the
/// connection open, and could read bytes meant for its parent. In the child the descriptor refers to something else, so
/// both processes may close it.
class NotForChildren {
 public:
  explicit NotForChildren(int fd);
  ~NotForChildren();
  NotForChildren(const NotForChildren&) = delete;
  NotForChildren& operator=(const NotForChildren&) = delete;

 private:
  int fd_;
};

}  // namespace farandole
