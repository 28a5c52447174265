#pragma once

#include <cstddef>
#include <span>

#include "transport/mesh.h"

namespace farandole {

/// Brings the bytes of every rank to every rank: `bytes[r]` of rank r to `out[r]`, zero allowed.
///
/// `bytes` is the same on all ranks; `mine` holds `bytes[rank]` and may be the own place in the output. Every rank
/// sends its bytes straight to each of the others: (N-1) times its bytes out, everybody else's in, one step. Throws
/// what the guard throws, and `peer_lost`; the links are unusable after that.
void link_allgather(Mesh& mesh, std::span<const std::byte> mine, std::span<std::byte* const> out,
                    std::span<const size_t> bytes);

}  // namespace farandole
