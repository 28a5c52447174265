#include <algorithm>
#include <vector>

#include "collectives/shm_collectives.h"
#include "collectives/shm_stripes.h"

namespace farandole {

void shm_reducescatter(SharedMesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts,
                       DType dtype, const Reduction& reduction) {
  const size_t width = size_of(dtype);
  const int me = mesh.rank();
  const auto n = static_cast<size_t>(mesh.size());
  const size_t longest = width * *std::max_element(counts.begin(), counts.end());
  std::vector<const std::byte*> shares(n);
  for (size_t rank = 0; rank < n; in += counts[rank++] * width) shares[rank] = in;
  std::vector<const void*> sources(n);
  const size_t step = mesh.chunk_bytes();
  const auto part = [&](int owner, size_t at) {
    return step_bytes(counts[static_cast<size_t>(owner)] * width, at, step);
  };
  in_stripes(
      mesh, longest, step,
      [&](uint32_t stripe, size_t at) {
        for (int owner = 0; owner < mesh.size(); ++owner)
          if (const size_t bytes = part(owner, at); owner != me && bytes > 0)
            SharedMesh::copy_to_slot(mesh.slot(me, stripe, owner), shares[static_cast<size_t>(owner)] + at, bytes);
      },
      [&](uint32_t stripe, size_t at) {
        const size_t bytes = part(me, at);
        if (bytes == 0) return;
        mesh.await_arrived(stripe);
        for (int peer = 0; peer < mesh.size(); ++peer)
          sources[static_cast<size_t>(peer)] =
              peer == me ? shares[static_cast<size_t>(me)] + at : mesh.slot(peer, stripe, me);
        reduce(dtype, reduction, out + at, sources, bytes / width);
      });
}

}  // namespace farandole
