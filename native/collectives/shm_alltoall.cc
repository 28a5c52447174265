#include "collectives/shm_collectives.h"
#include "collectives/shm_stripes.h"

namespace farandole {

void shm_alltoall(SharedMesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send,
                  std::span<std::byte* const> out, std::span<const size_t> receive, size_t longest) {
  const auto me = static_cast<size_t>(mesh.rank());
  const size_t step = mesh.slot_bytes();
  const auto deliver = copy_of_results(longest * send.size());
  in_stripes(
      mesh, longest, step,
      [&](uint32_t stripe, size_t at) {
        for_each_peer(mesh, [&](int peer) {
          const auto index = static_cast<size_t>(peer);
          if (const size_t count = step_bytes(send[index], at, step); count > 0)
            SharedMesh::copy_to_slot(mesh.slot(mesh.rank(), stripe, peer), in[index] + at, count);
        });
        if (const size_t count = step_bytes(send[me], at, step); count > 0) deliver(out[me] + at, in[me] + at, count);
      },
      [&](uint32_t stripe, size_t at) {
        for_each_peer(mesh, [&](int peer) {
          const auto index = static_cast<size_t>(peer);
          mesh.await_arrived(stripe, peer);
          if (const size_t count = step_bytes(receive[index], at, step); count > 0)
            deliver(out[index] + at, mesh.slot(peer, stripe, mesh.rank()), count);
        });
      });
}

}  // namespace farandole
