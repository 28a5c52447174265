#include "device/pinned_pool.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      capacity_(other.capacity_),
      device_(other.device_),
      pool_(std::move(other.pool_)) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(capacity_, other.capacity_);
  std::swap(device_, other.device_);
  std::swap(pool_, other.pool_);
  return *this;
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr && pool_ != nullptr) pool_->give_back({data_, capacity_, device_});
}

std::shared_ptr<PinnedPool> PinnedPool::make(size_t limit) {
  return std::shared_ptr<PinnedPool>(new PinnedPool(limit));
}

PinnedPool::~PinnedPool() {
  if (fork_number() != fork_number_) return;  // CUDA does not work in a forked child
  for (const Block& block : kept_) block.device->free_pinned(block.data);
}

PinnedBuffer PinnedPool::take(CudaDevice& device, size_t bytes) {
  {
    const std::lock_guard lock(mu_);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
      if (it->capacity >= bytes && (it->capacity == kPage || it->capacity / 2 <= bytes) &&
          (best == kept_.end() || it->capacity < best->capacity))
        best = it;
    if (best != kept_.end()) {
      const Block block = *best;
      kept_.erase(best);
      bytes_ -= block.capacity;
      return {block.data, block.capacity, block.device, shared_from_this()};
    }
  }
  const size_t capacity = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  return {device.allocate_pinned(capacity), capacity, &device, shared_from_this()};
}

void PinnedPool::give_back(const Block& block) noexcept {
  if (fork_number() != fork_number_) return;
  std::vector<Block> surplus;
  {
    const std::lock_guard lock(mu_);
    kept_.push_back(block);
    bytes_ += block.capacity;
    while (bytes_ > limit_) {
      bytes_ -= kept_.front().capacity;
      surplus.push_back(kept_.front());
      kept_.erase(kept_.begin());
    }
  }
  // May wait for the device, so not under the lock.
  for (const Block& each : surplus) each.device->free_pinned(each.data);
}

size_t PinnedPool::kept_bytes() {
  const std::lock_guard lock(mu_);
  return bytes_;
}

}  // namespace farandole
