#include "transport/ring.h"

#include <algorithm>
#include <cstring>

namespace farandole {

size_t Ring::push(std::span<const std::byte> bytes) {
  const uint64_t at = written.bytes.load(std::memory_order_relaxed);
  const uint64_t room = capacity - (at - read.bytes.load(std::memory_order_acquire));
  const size_t count = std::min<size_t>(bytes.size(), room);
  if (count == 0) return 0;
  const size_t start = at & (capacity - 1);
  const size_t first = std::min<size_t>(count, capacity - start);
  std::memcpy(data() + start, bytes.data(), first);
  std::memcpy(data(), bytes.data() + first, count - first);
  written.bytes.store(at + count, std::memory_order_release);
  return count;
}

size_t Ring::pop(std::span<std::byte> bytes) {
  const uint64_t at = read.bytes.load(std::memory_order_relaxed);
  const uint64_t there = written.bytes.load(std::memory_order_acquire) - at;
  const size_t count = std::min<size_t>(bytes.size(), there);
  if (count == 0) return 0;
  const size_t start = at & (capacity - 1);
  const size_t first = std::min<size_t>(count, capacity - start);
  std::memcpy(bytes.data(), data() + start, first);
  std::memcpy(bytes.data() + first, data(), count - first);
  read.bytes.store(at + count, std::memory_order_release);
  return count;
}

}  // namespace farandole
