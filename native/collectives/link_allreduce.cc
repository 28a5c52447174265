#include <algorithm>
#include <vector>

#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"
#include "collectives/link_segments.h"

namespace farandole {
namespace {

// Up to this many ranks, a message to each peer takes less time than further steps.
constexpr size_t kFewRanks = 8;

/// Gathers the `bytes` of all ranks in `rows`; row i is of rank (own + i) mod N, and row 0 is filled already.
void gather_rows(Mesh& mesh, const std::byte* own, std::byte* rows, size_t bytes) {
  const auto n = static_cast<size_t>(mesh.size());
  const auto peer = [&](size_t distance) {
    return &mesh.link(static_cast<int>((static_cast<size_t>(mesh.rank()) + distance) % n));
  };
  if (n <= kFewRanks) {
    std::vector<Outgoing> sends;
    std::vector<Incoming> receives;
    for (size_t i = 1; i < n; ++i) {
      sends.push_back({peer(i), own, bytes});
      receives.push_back({peer(i), rows + i * bytes, bytes});
    }
    exchange(mesh, sends, receives);
    return;
  }
  // Bruck's algorithm: the data of a rank doubles with every step.
  for (size_t have = 1; have < n;) {
    const size_t count = std::min(have, n - have);
    Outgoing send{peer(n - have), rows, count * bytes};
    Incoming receive{peer(have), rows + have * bytes, count * bytes};
    exchange(mesh, {&send, 1}, {&receive, 1});
    have += count;
  }
}

void all_at_once(Mesh& mesh, const BucketView& bucket, DType dtype, const Reduction& reduction) {
  const auto n = static_cast<size_t>(mesh.size());
  const auto me = static_cast<size_t>(mesh.rank());
  const size_t bytes = bucket.bytes();
  std::byte* rows = mesh.scratch(n * bytes);
  const std::byte* own = input_run(bucket, 0, bytes, rows);
  if (n > kFewRanks && own != rows) own = std::copy_n(own, bytes, rows) - bytes;
  gather_rows(mesh, own, rows, bytes);

  std::vector<const void*> sources(n);
  bucket.for_each(0, bytes, [&](const Piece& part, size_t done) {
    for (size_t i = 1; i < n; ++i) sources[(me + i) % n] = rows + i * bytes + done;
    sources[me] = part.in;
    reduce(dtype, reduction, part.out, sources, part.bytes / size_of(dtype));
  });
}

void alone(const BucketView& bucket, DType dtype, const Reduction& reduction) {
  for (const Piece& piece : bucket.pieces()) {
    const void* source = piece.in;
    if (piece.bytes != 0) reduce(dtype, reduction, piece.out, {&source, 1}, piece.bytes / size_of(dtype));
  }
}

void by_segments(Mesh& mesh, const BucketView& bucket, DType dtype, const Reduction& reduction) {
  const auto n = static_cast<size_t>(mesh.size());
  const size_t share = whole_lines((bucket.bytes() + n - 1) / n);
  std::vector<size_t> bounds(n + 1);
  for (size_t rank = 0; rank <= n; ++rank) bounds[rank] = std::min(rank * share, bucket.bytes());
  BucketData data(bucket, dtype, reduction);
  SegmentReduce(mesh, data, bounds, SegmentReduce::chunk_for(mesh, bounds)).run();
}

}  // namespace

const char* link_allreduce(Mesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction) {
  const BucketView bucket(pieces);
  if (bucket.bytes() == 0) return "nothing";
  if (mesh.size() == 1) {
    alone(bucket, dtype, reduction);
    return "alone";
  }
  if (bucket.bytes() * static_cast<size_t>(mesh.size() - 1) <= mesh.small_bytes()) {
    all_at_once(mesh, bucket, dtype, reduction);
    return "links at once";
  }
  by_segments(mesh, bucket, dtype, reduction);
  return "links by segments";
}

}  // namespace farandole
