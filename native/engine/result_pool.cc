#include "engine/result_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

/// A hint: large pages take a hundredth of the page faults.
std::byte* allocate(size_t capacity) {
  const bool large = capacity >= 2 * kHugePage;
  const size_t alignment = large ? kHugePage : ResultBuffer::kAlignment;
  void* data = std::aligned_alloc(alignment, round_up(capacity, alignment));
  if (data == nullptr) throw std::bad_alloc();
  if (large) madvise(data, capacity / kHugePage * kHugePage, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

}  // namespace

ResultBuffer::ResultBuffer(std::byte* data, size_t capacity, std::weak_ptr<ResultPool> pool)
    : data_(data), capacity_(capacity), pool_(std::move(pool)) {}

ResultBuffer::ResultBuffer(ResultBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), capacity_(other.capacity_), pool_(std::move(other.pool_)) {}

ResultBuffer& ResultBuffer::operator=(ResultBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(capacity_, other.capacity_);
  std::swap(pool_, other.pool_);
  return *this;
}

ResultBuffer::~ResultBuffer() {
  if (data_ == nullptr) return;
  if (const std::shared_ptr<ResultPool> pool = pool_.lock()) pool->give_back({data_, capacity_});
  else std::free(data_);
}

std::shared_ptr<ResultPool> ResultPool::make(size_t limit) {
  return std::shared_ptr<ResultPool>(new ResultPool(limit));
}

ResultPool::~ResultPool() {
  for (const Block& block : kept_) std::free(block.data);
}

ResultBuffer ResultPool::take(size_t bytes) {
  {
    const std::lock_guard lock(mu_);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
      if (it->capacity >= bytes && it->capacity / 2 <= bytes && (best == kept_.end() || it->capacity < best->capacity))
        best = it;
    if (best != kept_.end()) {
      const Block block = *best;
      kept_.erase(best);
      bytes_ -= block.capacity;
      return {block.data, block.capacity, weak_from_this()};
    }
  }
  const size_t capacity =
      round_up(std::max<size_t>(bytes, 1), bytes < kWorthKeeping ? ResultBuffer::kAlignment : kPage);
  return {allocate(capacity), capacity, weak_from_this()};
}

void ResultPool::give_back(Block block) noexcept {
  // In a forked child a missing thread may hold the lock.
  if (block.capacity >= kWorthKeeping && fork_number() == fork_number_) {
    const std::lock_guard lock(mu_);
    if (block.capacity <= limit_) {
      while (bytes_ + block.capacity > limit_) {
        bytes_ -= kept_.front().capacity;
        std::free(kept_.front().data);
        kept_.erase(kept_.begin());
      }
      kept_.push_back(block);
      bytes_ += block.capacity;
      return;
    }
  }
  std::free(block.data);
}

void ResultPool::close() {
  const std::lock_guard lock(mu_);
  limit_ = 0;
  bytes_ = 0;
  for (const Block& block : kept_) std::free(block.data);
  kept_.clear();
}

size_t ResultPool::kept_bytes() {
  const std::lock_guard lock(mu_);
  return bytes_;
}

}  // namespace farandole
