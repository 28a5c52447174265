#include "collectives/shm_exchange.h"

#include <algorithm>
#include <numeric>

#include "base/reduce.h"

namespace farandole {
namespace {

/// Bytes that a rank lays out per stripe.
constexpr size_t kStripeBytes = size_t{256} << 10;

/// A result larger than this is not found in a cache when somebody reads it after the operation.
constexpr size_t kCached = size_t{8} << 20;

/// Runs the same two halves for every stripe: `put(slot, at)` lays bytes from `at` on into this rank's slot, and
/// `take(stripe, at)`, one stripe behind, reads what others have laid into theirs; `step` bytes of progress per stripe.
/// While a rank reads a stripe, the others' next one is being written.
template <class Put, class Take>
void in_stripes(SharedMesh& mesh, size_t longest, size_t step, Put put, Take take) {
  const uint32_t first = mesh.begin_stripes(false);
  const auto count = static_cast<uint32_t>((longest + step - 1) / step);
  for (uint32_t k = 0; k <= count; ++k) {
    if (k < count) {
      // The slot is free once all ranks have read the stripe that it held before.
      if (k >= kStripes) mesh.await_finished(first + k - kStripes);
      put(mesh.slot(mesh.rank(), first + k), k * step);
      mesh.arrive(first + k);
    }
    if (k > 0) {
      take(first + k - 1, (k - 1) * step);
      mesh.finish(first + k - 1);
    }
  }
  mesh.end_stripes(first + count);
}

size_t part(size_t bytes, size_t at, size_t step) { return at < bytes ? std::min(step, bytes - at) : 0; }

size_t stripe_step(const SharedMesh& mesh) {
  return std::min(mesh.slot_bytes() * static_cast<size_t>(mesh.size()), kStripeBytes);
}

/// Calls `visit` for all ranks but this one, each rank beginning with its neighbour: so they read different slots.
template <class Visit>
void for_each_peer(SharedMesh& mesh, Visit visit) {
  for (int step = 1; step < mesh.size(); ++step) visit((mesh.rank() + step) % mesh.size());
}

}  // namespace

void shm_allgather(SharedMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                   std::span<const size_t> bytes) {
  const auto me = static_cast<size_t>(mesh.rank());
  const size_t step = stripe_step(mesh);
  const size_t longest = *std::max_element(bytes.begin(), bytes.end());
  const size_t total = std::accumulate(bytes.begin(), bytes.end(), size_t{0});
  // Elsewhere the result lies where the caller has just written, or is no larger than what it is made of.
  const auto deliver = total > kCached ? stream_bytes : copy_bytes;
  in_stripes(
      mesh, longest, step,
      [&](std::byte* slot, size_t at) {
        const size_t count = part(bytes[me], at, step);
        if (count == 0) return;
        SharedMesh::lay_out(slot, mine + at, count);
        if (out[me] != mine) deliver(out[me] + at, mine + at, count);
      },
      [&](uint32_t stripe, size_t at) {
        for_each_peer(mesh, [&](int peer) {
          const auto index = static_cast<size_t>(peer);
          mesh.await_arrived(stripe, peer);
          if (const size_t count = part(bytes[index], at, step); count > 0)
            deliver(out[index] + at, mesh.slot(peer, stripe), count);
        });
      });
}

void shm_broadcast(SharedMesh& mesh, std::span<const Piece> pieces, int root) {
  const BucketView bucket(pieces);
  const size_t step = stripe_step(mesh);
  const bool sends = mesh.rank() == root;
  in_stripes(
      mesh, bucket.bytes(), step,
      [&](std::byte* slot, size_t at) {
        if (!sends) return;
        bucket.for_each(at, part(bucket.bytes(), at, step), [&](const Piece& piece, size_t done) {
          SharedMesh::lay_out(slot + done, piece.in, piece.bytes);
          if (piece.out != piece.in) copy_bytes(piece.out, piece.in, piece.bytes);
        });
      },
      [&](uint32_t stripe, size_t at) {
        // The root waits for nobody here, so that it fills one slot while the others read another.
        if (sends) return;
        mesh.await_arrived(stripe, root);
        const std::byte* slot = mesh.slot(root, stripe);
        bucket.for_each(at, part(bucket.bytes(), at, step),
                        [&](const Piece& piece, size_t done) { copy_bytes(piece.out, slot + done, piece.bytes); });
      });
}

void shm_alltoall(SharedMesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send,
                  std::span<std::byte* const> out, std::span<const size_t> receive, size_t longest) {
  const auto me = static_cast<size_t>(mesh.rank());
  const size_t step = mesh.slot_bytes();
  in_stripes(
      mesh, longest, step,
      [&](std::byte* slot, size_t at) {
        for_each_peer(mesh, [&](int peer) {
          const auto index = static_cast<size_t>(peer);
          if (const size_t count = part(send[index], at, step); count > 0)
            SharedMesh::lay_out(slot + index * step, in[index] + at, count);
        });
        if (const size_t count = part(send[me], at, step); count > 0) copy_bytes(out[me] + at, in[me] + at, count);
      },
      [&](uint32_t stripe, size_t at) {
        for_each_peer(mesh, [&](int peer) {
          const auto index = static_cast<size_t>(peer);
          mesh.await_arrived(stripe, peer);
          if (const size_t count = part(receive[index], at, step); count > 0)
            copy_bytes(out[index] + at, mesh.slot(peer, stripe, mesh.rank()), count);
        });
      });
}

void shm_barrier(SharedMesh& mesh) {
  const uint32_t number = mesh.begin_small();
  mesh.publish_small(number);
  for (int peer = 0; peer < mesh.size(); ++peer) mesh.await_small(peer, number);
}

}  // namespace farandole
