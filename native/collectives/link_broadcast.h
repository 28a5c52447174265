#pragma once

#include <span>

#include "collectives/piece.h"
#include "transport/mesh.h"

namespace farandole {

/// Brings the inputs of `root` to the outputs of all ranks, the root's own too. Other ranks' inputs are not read.
///
/// N ranks, S bytes: small S go down a binomial tree, log2(N) steps; large S down a chain, where every rank sends S
/// once and the chunks follow each other closely, so the time hardly depends on N. Throws what the guard throws, and
/// `peer_lost`; the links are unusable after that.
void link_broadcast(Mesh& mesh, std::span<const Piece> pieces, int root);

}  // namespace farandole
