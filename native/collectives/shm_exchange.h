#pragma once

#include <cstddef>
#include <span>

#include "collectives/piece.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// Gathers bytes: `bytes[r]` of rank r land at `out[r]` on every rank. Zero bytes are allowed.
void shm_allgather(SharedMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                   std::span<const size_t> bytes);

/// Copies the bucket of rank `root` to every rank's.
void shm_broadcast(SharedMesh& mesh, std::span<const Piece> pieces, int root);

/// Sends `send[r]` bytes at `in[r]` to rank r and receives `receive[r]` bytes of rank r at `out[r]`. `longest` is the
/// largest share that any rank sends to any other; all ranks must name the same.
void shm_alltoall(SharedMesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send,
                  std::span<std::byte* const> out, std::span<const size_t> receive, size_t longest);

/// Returns when every rank has come.
void shm_barrier(SharedMesh& mesh);

}  // namespace farandole
