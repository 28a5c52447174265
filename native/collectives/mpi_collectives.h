#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "transport/mpi_mesh.h"

namespace farandole {

// The collectives over MPI. Each blocks until this rank's part is done, and throws what the guard throws, or Error
// (Fabric) when MPI fails. All ranks must call them in the same order.

/// Combines the pieces over all ranks; returns the algorithm.
///
/// MPI_Iallreduce combines numbers in pairs. That gives the results of reduce(), except for the last bits of float32
/// and float64, for: sums, products, minima and maxima of whole numbers without factors; all operations on float32,
/// float64; minima and maxima of halves without factors; bools. MPI's own operators do so where they agree with
/// reduce(), ours for NaN, halves, bools and short integers. For all else (sums of halves, which are rounded once,
/// averages of whole numbers, which are exact) ranks exchange shares, combine them by reduce() and gather the results,
/// which moves as many bytes.
const char* mpi_allreduce(MpiMesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction);

/// Sets `out` to this rank's share, `counts[rank]` elements, of the reduction of `in`. Ranks exchange shares and
/// combine them by reduce().
void mpi_reducescatter(MpiMesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                       const Reduction& reduction);

void mpi_allgather(MpiMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                   std::span<const size_t> bytes);
void mpi_broadcast(MpiMesh& mesh, std::span<const Piece> pieces, int root);
void mpi_alltoall(MpiMesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send,
                  std::span<std::byte* const> out, std::span<const size_t> receive);
void mpi_barrier(MpiMesh& mesh);

// Parts of the algorithms.

inline constexpr size_t kMostMpiBytes = size_t{1} << 30;  // of one call of MPI, which counts in ints

/// Sends and receives the given bytes to and from each other rank; the entries of this rank are not used.
void mpi_exchange(MpiMesh& mesh, std::span<const std::span<const std::byte>> send,
                  std::span<const std::span<std::byte>> receive);

/// Calls `visit` for each piece; small ones are packed into one piece first and unpacked afterwards. All ranks pack the
/// same pieces.
void for_each_run(MpiMesh& mesh, std::span<const Piece> pieces, const std::function<void(const Piece&)>& visit);

}  // namespace farandole
