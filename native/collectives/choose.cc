#include "collectives/choose.h"

#include <algorithm>
#include <vector>

#include "collectives/grid_allgather.h"
#include "collectives/grid_allreduce.h"
#include "collectives/grid_barrier.h"
#include "collectives/grid_broadcast.h"
#include "collectives/grid_reducescatter.h"
#include "collectives/link_allgather.h"
#include "collectives/link_allreduce.h"
#include "collectives/link_alltoall.h"
#include "collectives/link_barrier.h"
#include "collectives/link_broadcast.h"
#include "collectives/link_reducescatter.h"
#include "collectives/shm_allreduce.h"
#include "collectives/shm_exchange.h"

namespace farandole {

void World::turn(const Knobs& knobs) {
  if (shared_) shared_->use_of_slots(knobs.slot_bytes);
  if (links_) links_->use_sizes(knobs.link_chunk, knobs.link_small);
  if (grid_) {
    grid_->shared().use_of_slots(knobs.slot_bytes);
    grid_->column().use_sizes(knobs.link_chunk, knobs.link_small);
  }
  hierarchical_ = knobs.hierarchical;
}

const char* World::allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) {
  if (shared_) return shm_allreduce(*shared_, pieces, dtype, reduction);
  if (in_two_levels()) return grid_allreduce(*grid_, pieces, dtype, reduction);
  return link_allreduce(*links_, pieces, dtype, reduction);
}

const char* World::allgather(const std::byte* mine, std::span<std::byte* const> out, std::span<const size_t> bytes) {
  if (shared_) shm_allgather(*shared_, mine, out, bytes);
  else if (in_two_levels()) grid_allgather(*grid_, mine, out, bytes);
  else link_allgather(*links_, {mine, bytes[static_cast<size_t>(links_->rank())]}, out, bytes);
  return family();
}

const char* World::broadcast(std::span<const Piece> pieces, int root) {
  if (shared_) shm_broadcast(*shared_, pieces, root);
  else if (in_two_levels()) grid_broadcast(*grid_, pieces, root);
  else link_broadcast(*links_, pieces, root);
  return family();
}

const char* World::alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                            const Shares& shares) {
  if (in_two_levels()) {
    grid_alltoall(*grid_, in, out, shares);
    return family();
  }
  const int size = shared_ ? shared_->size() : links_->size();
  const int rank = shared_ ? shared_->rank() : links_->rank();
  std::vector<size_t> send, receive;
  size_t longest = 0;
  for (int peer = 0; peer < size; ++peer) {
    send.push_back(shares(rank, peer));
    receive.push_back(shares(peer, rank));
    for (int to = 0; to < size; ++to) longest = std::max(longest, shares(peer, to));
  }
  if (shared_) shm_alltoall(*shared_, in, send, out, receive, longest);
  else link_alltoall(*links_, in, send, out, receive);
  return family();
}

const char* World::reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                                 const Reduction& reduction) {
  if (shared_) shm_reducescatter(*shared_, in, out, counts, dtype, reduction);
  else if (in_two_levels()) grid_reducescatter(*grid_, in, out, counts, dtype, reduction);
  else link_reducescatter(*links_, in, out, counts, dtype, reduction);
  return family();
}

const char* World::barrier() {
  if (shared_) shm_barrier(*shared_);
  else if (in_two_levels()) grid_barrier(*grid_);
  else link_barrier(*links_);
  return family();
}

const char* World::family() const { return shared_ ? "shm slots" : in_two_levels() ? "grid" : "links"; }

}  // namespace farandole
