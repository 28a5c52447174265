#include <algorithm>
#include <vector>

#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"
#include "collectives/shm_collectives.h"

namespace farandole {
namespace {

// Up to this size one rank uses the network as fast as all ranks of its host together (its host's memory is not a
// faster way to the others), and it saves a hop.
constexpr size_t kColumnBytes = 256 << 10;

std::vector<Piece> cut(const BucketView& bucket, size_t offset, size_t bytes) {
  std::vector<Piece> pieces;
  bucket.for_each(offset, bytes, [&](const Piece& part, size_t) { pieces.push_back(part); });
  return pieces;
}

std::vector<Piece> from_outputs(std::vector<Piece> pieces) {
  for (Piece& piece : pieces) piece.in = piece.out;
  return pieces;
}

}  // namespace

void grid_broadcast(GridMesh& mesh, std::span<const Piece> pieces, int root) {
  const BucketView bucket(pieces);
  if (bucket.bytes() == 0) return;
  const Grid& grid = mesh.grid();
  const auto [host, local] = grid.place_of(root);
  if (bucket.bytes() <= kColumnBytes) {
    if (grid.local == local) link_broadcast(mesh.column(), pieces, host);
    const std::vector<Piece> here = from_outputs({pieces.begin(), pieces.end()});
    shm_broadcast(mesh.shared(), here, local);
    return;
  }
  if (grid.host == host) shm_broadcast(mesh.shared(), pieces, local);
  const size_t shard = whole_lines((bucket.bytes() + mesh.locals() - 1) / mesh.locals());
  const auto start = [&](int owner) { return std::min(static_cast<size_t>(owner) * shard, bucket.bytes()); };
  const auto shard_of = [&](int owner) {
    return from_outputs(cut(bucket, start(owner), start(owner + 1) - start(owner)));
  };
  link_broadcast(mesh.column(), shard_of(grid.local), host);
  if (grid.host == host) return;
  for (int owner = 0; owner < grid.locals; ++owner) shm_broadcast(mesh.shared(), shard_of(owner), owner);
}

}  // namespace farandole
