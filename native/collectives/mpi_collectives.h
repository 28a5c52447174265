#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "collectives/world.h"
#include "transport/mpi_mesh.h"

namespace farandole {

// The collectives over MPI. Each blocks until this rank's part is done, and throws what the guard throws, or Error
// (Fabric) when MPI fails. All ranks must call them in the same order.

/// Reduces the pieces over all ranks; returns the algorithm's name for the timeline.
///
/// MPI_Iallreduce combines inputs in pairs. It is used where that gives the result of reduce(), except for the last
/// bits of float32 and float64: sums, products, minima and maxima of integers without factors; all reductions of
/// float32 and float64; minima and maxima of 16-bit floats without factors; bools. It uses MPI's operators where these
/// agree with reduce(), and our own for minima and maxima of floats, for bools, and for sums of 8-bit and 16-bit
/// integers. Otherwise, as for sums of 16-bit floats, which are rounded once, and for averages of integers, which are
/// exact, ranks exchange shares, combine them by reduce() and gather the results. That moves as many bytes.
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

/// The functions of the world over these collectives; see MeshWorld.
struct MpiCalls {
  static constexpr const char* name = "mpi";
  static constexpr auto allreduce = mpi_allreduce;
  static constexpr auto allgather = mpi_allgather;
  static constexpr auto broadcast = mpi_broadcast;
  static constexpr auto reducescatter = mpi_reducescatter;

  static void turn(MpiMesh& /*mesh*/, const Knobs& /*knobs*/) {}
  static void alltoall(MpiMesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) {
    const OwnShares own(shares, mesh.rank(), mesh.size());
    mpi_alltoall(mesh, in, own.send, out, own.receive);
  }
};

// Parts of the algorithms.

inline constexpr size_t kMostMpiBytes = size_t{1} << 30;  // per call of MPI, whose counts are ints

/// Sends and receives the given bytes to and from each other rank; the entries of this rank are not used.
void mpi_exchange(MpiMesh& mesh, std::span<const std::span<const std::byte>> send,
                  std::span<const std::span<std::byte>> receive);

/// Calls `visit` for each piece. Packs neighbouring small pieces into one piece before the call, and unpacks them
/// afterwards. All ranks pack the same pieces.
void for_each_run(MpiMesh& mesh, std::span<const Piece> pieces, const std::function<void(const Piece&)>& visit);

}  // namespace farandole
