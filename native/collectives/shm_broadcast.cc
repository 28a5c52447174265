#include "collectives/shm_collectives.h"
#include "collectives/shm_stripes.h"

namespace farandole {

void shm_broadcast(SharedMesh& mesh, std::span<const Piece> pieces, int root) {
  const BucketView bucket(pieces);
  const size_t step = whole_slot_step(mesh);
  const bool sends = mesh.rank() == root;
  const auto deliver = copy_of_results(bucket.bytes());
  in_stripes(
      mesh, bucket.bytes(), step,
      [&](uint32_t stripe, size_t at) {
        if (!sends) return;
        std::byte* slot = mesh.slot(mesh.rank(), stripe);
        bucket.for_each(at, step_bytes(bucket.bytes(), at, step), [&](const Piece& piece, size_t done) {
          SharedMesh::copy_to_slot(slot + done, piece.in, piece.bytes);
          if (piece.out != piece.in) copy_bytes(piece.out, piece.in, piece.bytes);
        });
      },
      [&](uint32_t stripe, size_t at) {
        // The root does not wait here, so that it fills one slot while the others read another.
        if (sends) return;
        mesh.await_arrived(stripe, root);
        const std::byte* slot = mesh.slot(root, stripe);
        bucket.for_each(at, step_bytes(bucket.bytes(), at, step),
                        [&](const Piece& piece, size_t done) { deliver(piece.out, slot + done, piece.bytes); });
      });
}

}  // namespace farandole
