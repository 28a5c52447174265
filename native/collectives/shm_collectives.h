#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "collectives/world.h"
#include "transport/shared_mesh.h"

namespace farandole {

// Collectives over the shared segment of one host. All block until all ranks of the host take part. They throw
// `PeerLost`, or what the guard throws.

/// Reduces a bucket over all ranks; every rank gets the same bits. Returns the algorithm's name for the timeline.
///
/// Small buckets: every rank publishes its bytes and combines all ranks' bytes, in rank order. Larger ones: chunked
/// reduce-scatter and allgather through the slots; each rank reduces one segment of every stripe. Each rank moves 2
/// (N-1)/N of the bucket through the cache.
const char* shm_allreduce(SharedMesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction);

/// Reduces `in` over all ranks and writes this rank's part to `out`: `counts[r]` elements for rank r, in rank order.
void shm_reducescatter(SharedMesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts,
                       DType dtype, const Reduction& reduction);

/// Gathers bytes: the `bytes[r]` of rank r go to `out[r]` on every rank. Zero bytes are allowed.
void shm_allgather(SharedMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                   std::span<const size_t> bytes);

/// Copies the bucket of rank `root` to every rank's bucket.
void shm_broadcast(SharedMesh& mesh, std::span<const Piece> pieces, int root);

/// Sends `send[r]` bytes at `in[r]` to rank r and receives `receive[r]` bytes of rank r at `out[r]`. `longest` is the
/// largest share that any rank sends to any other; all ranks must pass the same.
void shm_alltoall(SharedMesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send,
                  std::span<std::byte* const> out, std::span<const size_t> receive, size_t longest);

/// The functions of the world over these collectives; see MeshWorld.
struct SharedCalls {
  static constexpr const char* name = "shm slots";
  static constexpr auto allreduce = shm_allreduce;
  static constexpr auto allgather = shm_allgather;
  static constexpr auto broadcast = shm_broadcast;
  static constexpr auto reducescatter = shm_reducescatter;

  static void turn(SharedMesh& mesh, const Knobs& knobs) { mesh.use_of_slots(knobs.slot_bytes); }
  static void alltoall(SharedMesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) {
    const OwnShares own(shares, mesh.rank(), mesh.size());
    size_t longest = 0;  // share of all ranks
    for (int from = 0; from < mesh.size(); ++from)
      for (int to = 0; to < mesh.size(); ++to) longest = std::max(longest, shares(from, to));
    shm_alltoall(mesh, in, own.send, out, own.receive, longest);
  }
};

}  // namespace farandole
