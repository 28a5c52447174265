#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/reduce.h"
#include "collectives/piece.h"
#include "collectives/world.h"
#include "transport/mesh.h"

namespace farandole {

// Collectives over one link per peer, TCP or memory. All block until all ranks take part. They throw what the guard
// throws, or `peer_lost`; the links are unusable afterwards. N is the number of ranks, S the bytes of the bucket.

/// Reduces a bucket over all ranks; every rank gets the same bits, which are also those of shared memory. Returns the
/// algorithm's name for the timeline.
///
/// All inputs of an element are combined at once and in rank order. So 16-bit types are added in fp32 and rounded once,
/// and the result depends neither on the number of bytes nor on the other tensors of the bucket.
///   small S:  every rank gets every input; (N-1) S bytes in one step, or in log2(N) steps for many ranks
///   large S:  `SegmentReduce`; 2 (N-1)/N S bytes in two steps, chunk by chunk
const char* link_allreduce(Mesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction);

/// Sums float32 tensors as blocks of 8-bit integers (int8.h), times `factor`. Returns the algorithm's name.
///
/// `SegmentReduce` over blocks: a chunk is quantised before it is sent and dequantised when it has arrived.
const char* link_int8_allreduce(Mesh& mesh, std::span<const Piece> pieces, float factor);

/// Reduces `in` over all ranks and writes this rank's part to `out`: `counts[r]` elements for rank r, in rank order,
/// zero allowed.
///
/// `in` holds the sum of `counts` elements; `out` may overlap it only at this rank's part. Bits and rounding as with
/// `link_allreduce`. Every rank sends and receives (N-1)/N of the bytes in one step, chunk by chunk, one stream per
/// peer.
void link_reducescatter(Mesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                        const Reduction& reduction);

/// Gathers bytes: the `bytes[r]` of rank r go to `out[r]` on every rank, zero allowed.
///
/// `bytes` is the same on all ranks; `mine` holds `bytes[rank]` and may be this rank's place in the output. Every rank
/// sends its bytes directly to each other rank, in one step: (N-1) times its bytes out, all other ranks' bytes in.
void link_allgather(Mesh& mesh, std::span<const std::byte> mine, std::span<std::byte* const> out,
                    std::span<const size_t> bytes);

/// Copies the inputs of `root` to the outputs of all ranks, including the root's own. Other ranks' inputs are not read.
///
/// Small S use a binomial tree of log2(N) steps. Large S use a chain: every rank sends S once, and chunks follow each
/// other closely, so the time hardly depends on N.
void link_broadcast(Mesh& mesh, std::span<const Piece> pieces, int root);

/// Sends `send_bytes[r]` bytes at `in[r]` to rank r and receives `recv_bytes[r]` bytes of rank r at `out[r]`, zero
/// allowed.
///
/// The bytes that rank a sends to b must be the bytes that b receives from a; this rank's own part is copied. Inputs
/// and outputs may overlap only in that part. Every byte is sent once, directly to its rank, in one step.
void link_alltoall(Mesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send_bytes,
                   std::span<std::byte* const> out, std::span<const size_t> recv_bytes);

/// The functions of the world over these collectives; see MeshWorld.
struct LinkCalls {
  static constexpr const char* name = "links";
  static constexpr auto allreduce = link_allreduce;
  static constexpr auto broadcast = link_broadcast;
  static constexpr auto reducescatter = link_reducescatter;
  static constexpr auto int8_allreduce = link_int8_allreduce;

  static void turn(Mesh& mesh, const Knobs& knobs) { mesh.use_sizes(knobs.link_chunk, knobs.link_small); }
  static void allgather(Mesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) {
    link_allgather(mesh, {mine, bytes[static_cast<size_t>(mesh.rank())]}, out, bytes);
  }
  static void alltoall(Mesh& mesh, std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) {
    const OwnShares own(shares, mesh.rank(), mesh.size());
    link_alltoall(mesh, in, own.send, out, own.receive);
  }
};

}  // namespace farandole
