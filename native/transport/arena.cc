#include "transport/arena.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

std::shared_ptr<Arena> Arena::make(std::shared_ptr<Segment> segment, int rank) {
  return std::shared_ptr<Arena>(new Arena(std::move(segment), rank));
}

Arena::Arena(std::shared_ptr<Segment> segment, int rank) : segment_(std::move(segment)), rank_(rank) {
  free_.emplace(0, Segment::kArenaBytes);
}

std::shared_ptr<std::byte> Arena::take(size_t bytes) {
  std::byte* base = segment_->arena(rank_);
  size_t offset = 0;
  size_t room = 0;
  {
    const std::lock_guard lock(mu_);
    const auto fits = std::find_if(free_.begin(), free_.end(), [&](const auto& part) { return part.second >= bytes; });
    if (bytes > Segment::kArenaBytes || fits == free_.end())
      throw Error::invalid("empty_shared", std::to_string(bytes) + " bytes do not fit beside the " +
                                               std::to_string(used_) + " in use; a rank's shared buffers may take " +
                                               std::to_string(Segment::kArenaBytes) +
                                               " bytes in all, so let go of some or use ordinary tensors");
    room = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
    offset = fits->first;
    const size_t left = fits->second - room;
    free_.erase(fits);
    if (left > 0) free_.emplace(offset + room, left);
    used_ += room;
  }
  return {base + offset,
          [self = shared_from_this(), offset, room](std::byte*) noexcept { self->give_back(offset, room); }};
}

size_t Arena::used() {
  const std::lock_guard lock(mu_);
  return used_;
}

void Arena::give_back(size_t offset, size_t bytes) noexcept {
  // In a forked child the memory is the parent's, and a missing thread may hold the lock.
  if (fork_number() != fork_number_) return;
  segment_->release(rank_, offset, bytes);
  const std::lock_guard lock(mu_);
  used_ -= bytes;
  auto here = free_.emplace(offset, bytes).first;
  if (const auto next = std::next(here); next != free_.end() && offset + bytes == next->first) {
    here->second += next->second;
    free_.erase(next);
  }
  if (here == free_.begin()) return;
  if (const auto before = std::prev(here); before->first + before->second == offset) {
    before->second += here->second;
    free_.erase(here);
  }
}

}  // namespace farandole
