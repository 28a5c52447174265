#pragma once

#include "transport/mesh.h"

namespace farandole {

/// Returns on no rank before all ranks have called it; log2(N) steps of one byte.
///
/// Throws what the guard throws, and `peer_lost`; the links are unusable after that.
void link_barrier(Mesh& mesh);

}  // namespace farandole
