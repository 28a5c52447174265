#include <algorithm>
#include <numeric>

#include "collectives/shm_collectives.h"
#include "collectives/shm_stripes.h"

namespace farandole {

void shm_allgather(SharedMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                   std::span<const size_t> bytes) {
  const auto me = static_cast<size_t>(mesh.rank());
  const size_t step = whole_slot_step(mesh);
  const size_t longest = *std::max_element(bytes.begin(), bytes.end());
  const size_t total = std::accumulate(bytes.begin(), bytes.end(), size_t{0});
  const auto deliver = copy_of_results(total);
  in_stripes(
      mesh, longest, step,
      [&](uint32_t stripe, size_t at) {
        const size_t count = step_bytes(bytes[me], at, step);
        if (count == 0) return;
        SharedMesh::copy_to_slot(mesh.slot(mesh.rank(), stripe), mine + at, count);
        if (out[me] != mine) deliver(out[me] + at, mine + at, count);
      },
      [&](uint32_t stripe, size_t at) {
        for_each_peer(mesh, [&](int peer) {
          const auto index = static_cast<size_t>(peer);
          mesh.await_arrived(stripe, peer);
          if (const size_t count = step_bytes(bytes[index], at, step); count > 0)
            deliver(out[index] + at, mesh.slot(peer, stripe), count);
        });
      });
}

}  // namespace farandole
