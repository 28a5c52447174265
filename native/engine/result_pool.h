#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"

namespace farandole {

class ResultPool;

/// Memory for a result whose size only the plan tells. TensorFlow aborts on anything that is aligned to less than 64
/// bytes. Goes back to the pool that it came from, if that still is, and else to the system.
class ResultBuffer {
 public:
  static constexpr size_t kAlignment = 64;

  ResultBuffer(ResultBuffer&& other) noexcept;
  ResultBuffer& operator=(ResultBuffer&& other) noexcept;
  ~ResultBuffer();

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t capacity() const { return capacity_; }

 private:
  friend class ResultPool;
  ResultBuffer(std::byte* data, size_t capacity, std::weak_ptr<ResultPool> pool);

  std::byte* data_;
  size_t capacity_;
  std::weak_ptr<ResultPool> pool_;
};

/// Results that nobody uses any more, for the next ones: their pages are there already, and the kernel's clearing of
/// fresh ones takes longer than the collective that fills them. Safe for use by any number of threads.
///
/// Kept is what has at least kWorthKeeping bytes, up to `limit` in all; the longest unused goes first. A result takes
/// the smallest that is large enough and not more than twice as large as it needs.
class ResultPool : public std::enable_shared_from_this<ResultPool> {
 public:
  static constexpr size_t kWorthKeeping = 64 << 10;  // malloc does as well below

  [[nodiscard]] static std::shared_ptr<ResultPool> make(size_t limit);
  ~ResultPool();

  /// Throws std::bad_alloc.
  [[nodiscard]] ResultBuffer take(size_t bytes);

  /// Gives everything kept to the system; from now on nothing is kept.
  void close();

  [[nodiscard]] size_t kept_bytes();

 private:
  friend class ResultBuffer;
  struct Block {
    std::byte* data;
    size_t capacity;
  };
  explicit ResultPool(size_t limit) : limit_(limit) {}
  void give_back(Block block) noexcept;

  const uint32_t fork_number_ = fork_number();
  std::mutex mu_;            // guards what follows
  std::vector<Block> kept_;  // the longest unused first
  size_t bytes_ = 0;         // of them
  size_t limit_;
};

}  // namespace farandole
