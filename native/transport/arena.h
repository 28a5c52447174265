#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/fork.h"
#include "transport/segment.h"

namespace farandole {

/// Allocator for one rank's arena of the segment. All ranks of the host see the memory at the same offset. Thread-safe.
///
/// A buffer keeps the arena, and with it the segment, alive. Freeing a buffer returns its memory to the system at once.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  [[nodiscard]] static std::shared_ptr<Arena> make(std::shared_ptr<Segment> segment, int rank);

  /// Allocates a zeroed, page-aligned buffer of at least `bytes`. Throws Error (Invalid) when the arena is full.
  [[nodiscard]] std::shared_ptr<std::byte> take(size_t bytes);

  /// Bytes in use.
  [[nodiscard]] size_t used();

 private:
  Arena(std::shared_ptr<Segment> segment, int rank);
  void give_back(size_t offset, size_t bytes) noexcept;

  const uint32_t fork_number_ = fork_number();
  std::shared_ptr<Segment> segment_;
  int rank_;
  std::mutex mu_;                  // guards the members below
  std::map<size_t, size_t> free_;  // offset -> bytes; adjacent parts are merged
  size_t used_ = 0;
};

}  // namespace farandole
