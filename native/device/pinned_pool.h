#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"
#include "device/cuda_device.h"

namespace farandole {

class PinnedPool;

/// Pinned host memory; move-only. The destructor returns it to its pool, so no copy may use it any more.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  ~PinnedBuffer();

  [[nodiscard]] std::byte* data() const { return data_; }
  /// Leaves the memory allocated until the process ends, because a copy may still use it.
  void leak() { pool_.reset(); }

 private:
  friend class PinnedPool;
  PinnedBuffer(std::byte* data, size_t capacity, CudaDevice* device, std::shared_ptr<PinnedPool> pool)
      : data_(data), capacity_(capacity), device_(device), pool_(std::move(pool)) {}

  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
  CudaDevice* device_ = nullptr;
  std::shared_ptr<PinnedPool> pool_;
};

/// Pinned memory kept for reuse, because pinning takes milliseconds. Thread-safe.
///
/// Keeps unused buffers of at most `limit` bytes in total, and frees the longest unused first. A request takes the
/// smallest kept buffer that fits and is at most twice as large as needed.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  [[nodiscard]] static std::shared_ptr<PinnedPool> make(size_t limit);
  ~PinnedPool();

  /// Returns at least `bytes`, aligned to a page, uninitialized. Throws Error (Fabric).
  [[nodiscard]] PinnedBuffer take(CudaDevice& device, size_t bytes);

  [[nodiscard]] size_t kept_bytes();

 private:
  friend class PinnedBuffer;
  struct Block {
    std::byte* data;
    size_t capacity;
    CudaDevice* device;
  };
  explicit PinnedPool(size_t limit) : limit_(limit) {}
  void give_back(const Block& block) noexcept;

  const uint32_t fork_number_ = fork_number();
  const size_t limit_;
  std::mutex mu_;            // guards the members below
  std::vector<Block> kept_;  // the longest unused first
  size_t bytes_ = 0;         // of kept_
};

}  // namespace farandole
