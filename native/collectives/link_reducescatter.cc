#include <vector>

#include "collectives/link_collectives.h"
#include "collectives/link_segments.h"

namespace farandole {

void link_reducescatter(Mesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                        const Reduction& reduction) {
  std::vector<size_t> bounds(counts.size() + 1);
  for (size_t rank = 0; rank < counts.size(); ++rank) bounds[rank + 1] = bounds[rank] + counts[rank] * size_of(dtype);
  if (bounds.back() == 0) return;
  // The piece's output is never written: this rank's part goes to `out`, and nothing is gathered.
  const Piece whole{in, const_cast<std::byte*>(in), bounds.back()};
  const BucketView bucket({&whole, 1});
  BucketData data(bucket, dtype, reduction, out, bounds[static_cast<size_t>(mesh.rank())]);
  SegmentReduce(mesh, data, bounds, SegmentReduce::chunk_for(mesh, bounds), false).run();
}

}  // namespace farandole
