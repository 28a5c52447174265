#pragma once

#include <cstdint>

namespace farandole {

/// A number that a forked child does not share with its parent: what was made under another number is not this
/// process'. Costs a load, where getpid() would be a system call.
[[nodiscard]] uint32_t fork_number() noexcept;

/// While it lives, children that are forked do not get a socket: else a peer would not see the connection end when this
/// process dies and a child of it lives on, and the child could take bytes that are meant for its parent. The child
/// has something else under the same number, so that both may close it.
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
