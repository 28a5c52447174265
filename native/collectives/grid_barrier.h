#pragma once

#include "collectives/grid.h"

namespace farandole {

/// Returns on no rank before all ranks of the grid have called it: first in the host, then over the column, which
/// reaches every host. Throws what the guard throws, and `peer_lost`; the connections are unusable after that.
void grid_barrier(GridMesh& mesh);

}  // namespace farandole
