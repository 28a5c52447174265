#include "collectives/shm_exchange.h"

#include <algorithm>
#include <cstring>

namespace farandole {
namespace {

/// Runs the same two halves for every stripe: all ranks put bytes into their slots, then all read what they need.
/// `put(slot, at)` and `take(stripe, at)` handle the bytes from `at` on; `step` bytes of progress per stripe.
template <class Put, class Take>
void in_stripes(SharedMesh& mesh, size_t longest, size_t step, Put put, Take take) {
  const uint32_t first = mesh.begin_stripes(false);
  uint32_t stripe = first;
  for (size_t at = 0; at < longest; at += step, ++stripe) {
    // The slot is free once all ranks have read the stripe that it held before.
    if (stripe - first >= kStripes) mesh.await_finished(stripe - kStripes);
    put(mesh.slot(mesh.rank(), stripe), at);
    mesh.arrive(stripe);
    mesh.await_arrived(stripe);
    take(stripe, at);
    mesh.finish(stripe);
  }
  mesh.end_stripes(stripe);
}

size_t part(size_t bytes, size_t at, size_t step) { return at < bytes ? std::min(step, bytes - at) : 0; }

}  // namespace

void shm_allgather(SharedMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                   std::span<const size_t> bytes) {
  const auto me = static_cast<size_t>(mesh.rank());
  const size_t step = mesh.slot_bytes() * static_cast<size_t>(mesh.size());
  const size_t longest = *std::max_element(bytes.begin(), bytes.end());
  if (bytes[me] > 0 && out[me] != mine) std::memcpy(out[me], mine, bytes[me]);
  in_stripes(
      mesh, longest, step,
      [&](std::byte* slot, size_t at) {
        if (const size_t count = part(bytes[me], at, step); count > 0) std::memcpy(slot, mine + at, count);
      },
      [&](uint32_t stripe, size_t at) {
        for (size_t peer = 0; peer < bytes.size(); ++peer)
          if (const size_t count = part(bytes[peer], at, step); peer != me && count > 0)
            std::memcpy(out[peer] + at, mesh.slot(static_cast<int>(peer), stripe), count);
      });
}

void shm_broadcast(SharedMesh& mesh, std::span<const Piece> pieces, int root) {
  const Bucket bucket(pieces);
  const size_t step = mesh.slot_bytes() * static_cast<size_t>(mesh.size());
  const bool sends = mesh.rank() == root;
  in_stripes(
      mesh, bucket.bytes(), step,
      [&](std::byte* slot, size_t at) {
        if (!sends) return;
        bucket.for_each(at, part(bucket.bytes(), at, step),
                        [&](const Piece& piece, size_t done) { std::memcpy(slot + done, piece.in, piece.bytes); });
      },
      [&](uint32_t stripe, size_t at) {
        const std::byte* slot = mesh.slot(root, stripe);
        bucket.for_each(at, part(bucket.bytes(), at, step), [&](const Piece& piece, size_t done) {
          if (!sends) std::memcpy(piece.out, slot + done, piece.bytes);
          else if (piece.out != piece.in) std::memcpy(piece.out, piece.in, piece.bytes);
        });
      });
}

void shm_alltoall(SharedMesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send,
                  std::span<std::byte* const> out, std::span<const size_t> receive, size_t longest) {
  const auto me = static_cast<size_t>(mesh.rank());
  const size_t step = mesh.slot_bytes();
  if (send[me] > 0) std::memcpy(out[me], in[me], send[me]);
  in_stripes(
      mesh, longest, step,
      [&](std::byte* slot, size_t at) {
        for (size_t peer = 0; peer < send.size(); ++peer)
          if (const size_t count = part(send[peer], at, step); peer != me && count > 0)
            std::memcpy(slot + peer * step, in[peer] + at, count);
      },
      [&](uint32_t stripe, size_t at) {
        for (size_t peer = 0; peer < receive.size(); ++peer)
          if (const size_t count = part(receive[peer], at, step); peer != me && count > 0)
            std::memcpy(out[peer] + at, mesh.slot(static_cast<int>(peer), stripe, mesh.rank()), count);
      });
}

void shm_barrier(SharedMesh& mesh) {
  const uint32_t number = mesh.begin_small();
  mesh.publish_small(number);
  for (int peer = 0; peer < mesh.size(); ++peer) mesh.await_small(peer, number);
}

}  // namespace farandole
