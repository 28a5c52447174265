#include "collectives/shm_direct.h"

#include <algorithm>
#include <vector>

namespace farandole {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kBlock = 16 << 10;  // a result of this size is still in the first-level cache when it is copied on

/// Writes the places of the pieces in this rank's arena; false if a piece is outside it or not in place.
bool list_offers(SharedMesh& mesh, const BucketView& bucket) {
  const std::byte* base = mesh.arena_if_mapped(mesh.rank());
  if (base == nullptr || bucket.pieces().size() > kMostOffers) return false;
  uint64_t* offers = mesh.offers(mesh.rank());
  for (const Piece& piece : bucket.pieces()) {
    const auto offset = reinterpret_cast<uintptr_t>(piece.out) - reinterpret_cast<uintptr_t>(base);
    const bool inside = offset < Segment::kArenaBytes && piece.bytes <= Segment::kArenaBytes - offset;
    if (piece.bytes > 0 && (piece.in != piece.out || !inside)) return false;
    *offers++ = piece.bytes > 0 ? offset : 0;
  }
  return true;
}

/// The work of one rank on its share of the bucket.
class Share {
 public:
  Share(SharedMesh& mesh, DType dtype, const Reduction& reduction)
      : mesh_(mesh),
        dtype_(dtype),
        reduction_(reduction),
        places_(static_cast<size_t>(mesh.size())),
        sources_(places_.size()) {}

  /// Reduces `bytes` from offset `skip` of piece `index`.
  void reduce_part(size_t index, size_t skip, size_t bytes) {
    const auto me = static_cast<size_t>(mesh_.rank());
    for (size_t at = 0; at < bytes; at += kBlock) {
      const size_t part = std::min(kBlock, bytes - at);
      for (int peer = 0; peer < mesh_.size(); ++peer)
        places_[static_cast<size_t>(peer)] = mesh_.arena_if_mapped(peer) + mesh_.offers(peer)[index] + skip + at;
      std::copy(places_.begin(), places_.end(), sources_.begin());
      std::byte* also = places_.size() == 2 ? places_[1 - me] : nullptr;
      reduce(dtype_, reduction_, places_[me], sources_, part / size_of(dtype_), also);
      for (size_t peer = 0; also == nullptr && peer < places_.size(); ++peer)
        if (peer != me) copy_bytes(places_[peer], places_[me], part);
    }
  }

 private:
  SharedMesh& mesh_;
  DType dtype_;
  const Reduction& reduction_;
  std::vector<std::byte*> places_;  // by rank: the part in that rank's arena
  std::vector<const void*> sources_;
};

}  // namespace

bool shm_direct_allreduce(SharedMesh& mesh, const BucketView& bucket, DType dtype, const Reduction& reduction) {
  const bool mine = list_offers(mesh, bucket);
  const uint32_t number = mesh.offer(mine);
  if (!mine || !mesh.all_offer(number)) return false;
  // Shares begin at cache lines, which also keeps elements whole.
  const auto n = static_cast<size_t>(mesh.size());
  const size_t share = ((bucket.bytes() + n - 1) / n + kLine - 1) / kLine * kLine;
  const size_t begin = std::min(static_cast<size_t>(mesh.rank()) * share, bucket.bytes());
  const size_t end = std::min(begin + share, bucket.bytes());
  Share work(mesh, dtype, reduction);
  size_t first = 0;  // of the piece in the bucket
  for (size_t index = 0; index < bucket.pieces().size(); ++index) {
    const size_t last = first + bucket.pieces()[index].bytes;
    if (const size_t from = std::max(first, begin), to = std::min(last, end); from < to)
      work.reduce_part(index, from - first, to - from);
    first = last;
  }
  mesh.finish_direct(number);
  return true;
}

}  // namespace farandole
