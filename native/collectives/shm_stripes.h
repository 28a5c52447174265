#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/reduce.h"
#include "transport/shared_mesh.h"

namespace farandole {

/// The function that copies parts of results of `bytes` in total: past the caches if they are so large that they are no
/// longer there when the caller reads them.
[[nodiscard]] inline auto copy_of_results(size_t bytes) {
  constexpr size_t kCached = size_t{8} << 20;
  return bytes > kCached ? stream_bytes : copy_bytes;
}

/// Runs two halves for every stripe. `put(stripe, at)` writes bytes from offset `at` on into this rank's slots;
/// `take(stripe, at)`, one stripe behind, reads the other ranks' slots. Each stripe advances `step` bytes of the
/// `longest` share. While a rank reads one stripe, the others write the next.
template <class Put, class Take>
void in_stripes(SharedMesh& mesh, size_t longest, size_t step, Put put, Take take) {
  const uint32_t first = mesh.begin_stripes(false);
  const auto count = static_cast<uint32_t>((longest + step - 1) / step);
  for (uint32_t k = 0; k <= count; ++k) {
    if (k < count) {
      // A slot is free once all ranks have read its previous stripe.
      if (k >= kStripes) mesh.await_finished(first + k - kStripes);
      put(first + k, k * step);
      mesh.arrive(first + k);
    }
    if (k > 0) {
      take(first + k - 1, (k - 1) * step);
      mesh.finish(first + k - 1);
    }
  }
  mesh.end_stripes(first + count);
}

/// The number of bytes of the step at offset `at`, of `bytes` in total.
[[nodiscard]] inline size_t step_bytes(size_t bytes, size_t at, size_t step) {
  return at < bytes ? std::min(step, bytes - at) : 0;
}

/// The step of operations that use all slots of a rank as one.
[[nodiscard]] inline size_t whole_slot_step(const SharedMesh& mesh) {
  return std::min(mesh.slot_bytes() * static_cast<size_t>(mesh.size()), size_t{256} << 10);
}

/// Calls `visit` for all other ranks. Each rank starts with its neighbour, so that ranks read different slots.
template <class Visit>
void for_each_peer(const SharedMesh& mesh, Visit visit) {
  for (int step = 1; step < mesh.size(); ++step) visit((mesh.rank() + step) % mesh.size());
}

}  // namespace farandole
