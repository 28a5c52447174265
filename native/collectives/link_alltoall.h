#pragma once

#include <cstddef>
#include <span>

#include "transport/mesh.h"

namespace farandole {

/// Sends `send_bytes[r]` bytes at `in[r]` to rank r and receives `recv_bytes[r]` bytes of rank r at `out[r]`, zero
/// allowed.
///
/// What rank a sends to b must be what b receives from a; the own part is copied. Inputs and outputs may not overlap,
/// but for the own part. Every byte travels once, straight to its rank, in one step. Throws what the guard throws, and
/// `peer_lost`; the links are unusable after that.
void link_alltoall(Mesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send_bytes,
                   std::span<std::byte* const> out, std::span<const size_t> recv_bytes);

}  // namespace farandole
