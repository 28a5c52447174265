#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/fork.h"
#include "transport/segment.h"

namespace farandole {

/// Hands out one rank's arena of the segment: memory that the other ranks of the host see, at the same offset. Safe for
/// use by any number of threads.
///
/// A buffer keeps the arena, and so the segment, until it goes; its memory then goes back to the system at once.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  [[nodiscard]] static std::shared_ptr<Arena> make(std::shared_ptr<Segment> segment, int rank);

  /// A buffer of at least `bytes`, zeroed, at a page's begin. Throws Error (Invalid) when the arena has no such room.
  [[nodiscard]] std::shared_ptr<std::byte> take(size_t bytes);

  /// Bytes in use.
  [[nodiscard]] size_t used();

 private:
  Arena(std::shared_ptr<Segment> segment, int rank);
  void give_back(size_t offset, size_t bytes) noexcept;

  const uint32_t fork_number_ = fork_number();
  std::shared_ptr<Segment> segment_;
  int rank_;
  std::mutex mu_;                  // guards what follows
  std::map<size_t, size_t> free_;  // offset -> bytes; no two of them touch
  size_t used_ = 0;
};

}  // namespace farandole
