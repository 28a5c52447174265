#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/grid.h"
#include "collectives/piece.h"
#include "collectives/world.h"

namespace farandole {

// Collectives in two levels: memory within a host, links over the column. All block until all ranks take part. They
// throw what the guard throws, or `peer_lost`; the connections are unusable afterwards. H hosts of L ranks, S bytes.

/// Reduces a bucket over all ranks of a grid; every rank gets the same bits. Returns the algorithm's name for the
/// timeline.
///
/// Each element is combined over the ranks of each host, in rank order, then over the hosts, for every size. 16-bit
/// types are rounded once per level.
///   small S:  through memory in the host, then every rank with its column: one hop each
///   large S:  each rank reduces one of L shards within its host, then over its column, and shares the result with its
///             host. Chunks overlap memory and network, unless there are too many hosts for the slots. A host sends
///             2 (H-1)/H S bytes.
/// Averaged or scaled integers are sent whole to every rank, which combines them at once.
const char* grid_allreduce(GridMesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction);

/// Sums float32 tensors over all ranks, between hosts as blocks of 8-bit integers (int8.h), times `factor`. Returns the
/// algorithm's name.
///
/// The ranks of a host add in float32 through memory, each one of L shards; `link_int8_allreduce` sums the shard over
/// the column, and the host shares the results. A host sends 2 (H-1)/H of the blocks' bytes.
const char* grid_int8_allreduce(GridMesh& mesh, std::span<const Piece> pieces, float factor);

/// Reduces `in` over all ranks of the grid and writes this rank's part to `out`: `counts[r]` elements for rank r, in
/// rank order, zero allowed.
///
/// Within the host, the parts of a column go to the local rank of that column, which reduces them over the column. Bits
/// and rounding as with `grid_allreduce`.
void grid_reducescatter(GridMesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts,
                        DType dtype, const Reduction& reduction);

/// Gathers bytes: the `bytes[r]` of rank r go to `out[r]` on every rank of the grid. Zero bytes are allowed; `mine` may
/// be this rank's place in the output.
///
/// First over the column, so that every byte enters a host once, then over the ranks of the host through memory.
void grid_allgather(GridMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                    std::span<const size_t> bytes);

/// Copies the inputs of `root` to the outputs of all ranks of the grid, including the root's own.
///
///   small S:  over the root's column, then through memory in every host
///   large S:  through memory in the root's host; then each column brings one of L shards to the other hosts, whose
///             ranks exchange them
void grid_broadcast(GridMesh& mesh, std::span<const Piece> pieces, int root);

/// Sends `shares(rank, r)` bytes at `in[r]` to rank r and receives `shares(r, rank)` bytes of rank r at `out[r]`, zero
/// allowed.
///
/// Within the host, bytes go to the rank in the destination's column; then they go over the columns. Inputs and outputs
/// may overlap only in this rank's part.
void grid_alltoall(GridMesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                   const Shares& shares);

/// The functions of the world over these collectives; see MeshWorld.
struct GridCalls {
  static constexpr const char* name = "grid";
  static constexpr auto allreduce = grid_allreduce;
  static constexpr auto allgather = grid_allgather;
  static constexpr auto broadcast = grid_broadcast;
  static constexpr auto alltoall = grid_alltoall;
  static constexpr auto reducescatter = grid_reducescatter;
  static constexpr auto int8_allreduce = grid_int8_allreduce;

  static void turn(GridMesh& mesh, const Knobs& knobs) {
    mesh.shared().use_of_slots(knobs.slot_bytes);
    mesh.column().use_sizes(knobs.link_chunk, knobs.link_small);
  }
};

}  // namespace farandole
