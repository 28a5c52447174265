#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"

namespace farandole {

class ResultPool;

/// Memory for a result whose size comes from the plan. Aligned to 64 bytes, because TensorFlow aborts on less. Returns
/// to its pool, or to the system if the pool is gone.
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

/// Unused results kept for reuse, because their pages are mapped. Clearing fresh pages takes the kernel longer than the
/// collective takes to fill them. Thread-safe.
///
/// Keeps results of at least kWorthKeeping bytes, up to `limit` in total, and evicts the longest unused first. A
/// request takes the smallest kept result that fits and is at most twice as large as needed.
class ResultPool : public std::enable_shared_from_this<ResultPool> {
 public:
  static constexpr size_t kWorthKeeping = 64 << 10;  // smaller ones are as fast from malloc

  [[nodiscard]] static std::shared_ptr<ResultPool> make(size_t limit);
  ~ResultPool();

  /// Throws std::bad_alloc.
  [[nodiscard]] ResultBuffer take(size_t bytes);

  /// Frees all kept results; keeps none from now on.
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
  std::mutex mu_;            // guards the members below
  std::vector<Block> kept_;  // the longest unused first
  size_t bytes_ = 0;         // of kept_
  size_t limit_;
};

}  // namespace farandole
