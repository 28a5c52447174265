#include <vector>

#include "collectives/block_view.h"
#include "collectives/grid_collectives.h"
#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"
#include "collectives/shm_collectives.h"

namespace farandole {

const char* grid_int8_allreduce(GridMesh& mesh, std::span<const Piece> pieces, float factor) {
  const BucketView bucket(pieces);
  const BlockView blocks(pieces);
  // A shard holds whole blocks, so the shards cut tensors where any wiring cuts them into blocks.
  std::vector<size_t> counts(mesh.locals());
  for (size_t local = 0; local < mesh.locals(); ++local)
    blocks.for_each(blocks.first_block(local, mesh.locals()), blocks.first_block(local + 1, mesh.locals()),
                    [&](const Piece& values, size_t) { counts[local] += values.bytes / sizeof(float); });
  std::vector<size_t> sizes = counts;
  for (size_t& size : sizes) size *= sizeof(float);
  const auto own = static_cast<size_t>(mesh.grid().local);

  std::byte* staging = mesh.scratch(bucket.bytes() + sizes[own]);
  std::byte* mine = staging + bucket.bytes();
  shm_reducescatter(mesh.shared(), input_run(bucket, 0, bucket.bytes(), staging), mine, counts, DType::Float32, {});

  std::vector<Piece> shard;
  std::byte* at = mine;
  blocks.for_each(blocks.first_block(own, mesh.locals()), blocks.first_block(own + 1, mesh.locals()),
                  [&](const Piece& values, size_t) {
                    shard.push_back({at, at, values.bytes});
                    at += values.bytes;
                  });
  link_int8_allreduce(mesh.column(), shard, factor);

  std::byte* whole = output_place(bucket, 0, bucket.bytes(), staging);
  std::vector<std::byte*> out(mesh.locals());
  at = whole;
  for (size_t local = 0; local < mesh.locals(); at += sizes[local++]) out[local] = at;
  shm_allgather(mesh.shared(), mine, out, sizes);
  write_output(bucket, 0, bucket.bytes(), whole, staging);
  return "int8 in a grid";
}

}  // namespace farandole
