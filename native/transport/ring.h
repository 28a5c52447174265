#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace farandole {

/// A byte queue in shared memory with one writer and one reader. Positions count all bytes so far and wrap at 2^64.
struct Ring {
  struct alignas(128) Position {
    std::atomic<uint64_t> bytes{0};
  };

  Position written;
  Position read;
  alignas(128) uint64_t capacity;  // a power of two; set by the creator of the segment

  /// The ring's bytes, directly behind the struct.
  [[nodiscard]] std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }

  /// Returns the number of bytes taken; 0 when the ring is full.
  [[nodiscard]] size_t push(std::span<const std::byte> bytes);

  /// Returns the number of bytes read; 0 when the ring is empty.
  [[nodiscard]] size_t pop(std::span<std::byte> bytes);

  [[nodiscard]] bool empty() const {
    return written.bytes.load(std::memory_order_acquire) == read.bytes.load(std::memory_order_relaxed);
  }

  static size_t bytes_for(size_t capacity) { return sizeof(Ring) + capacity; }
};

}  // namespace farandole
