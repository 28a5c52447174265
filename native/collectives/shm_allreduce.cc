#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "collectives/shm_collectives.h"
#include "collectives/shm_direct.h"

namespace farandole {
namespace {

constexpr size_t kLine = 64;

void all_at_once(SharedMesh& mesh, const BucketView& bucket, DType dtype, const Reduction& reduction) {
  const uint32_t number = mesh.begin_small();
  std::byte* mine = mesh.small_slot(mesh.rank(), number);
  bucket.for_each(0, bucket.bytes(),
                  [&](const Piece& part, size_t done) { std::memcpy(mine + done, part.in, part.bytes); });
  mesh.publish_small(number);

  std::array<const void*, 16> few{};
  std::vector<const void*> many(mesh.size() > 16 ? static_cast<size_t>(mesh.size()) : 0);
  const std::span<const void*> sources =
      many.empty() ? std::span<const void*>(few).first(static_cast<size_t>(mesh.size())) : std::span<const void*>(many);
  for (int peer = 0; peer < mesh.size(); ++peer) mesh.await_small(peer, number);
  bucket.for_each(0, bucket.bytes(), [&](const Piece& part, size_t done) {
    for (int peer = 0; peer < mesh.size(); ++peer)
      sources[static_cast<size_t>(peer)] = mesh.small_slot(peer, number) + done;
    reduce(dtype, reduction, part.out, sources, part.bytes / size_of(dtype));
  });
}

/// One allreduce through the stripes. A stripe is a run of the bucket with N segments of equal size; rank r reduces
/// segment r.
///
/// Each rank runs copy_in(k+1), reduce(k), copy_out(k-1). The slots need no acknowledgement. A rank overwrites slot k
/// mod R in copy_in(k+R), after its copy_out(k+R-3) has seen all ranks' results of that stripe. So all ranks have read
/// its stripe k when R >= 3. It overwrites a result in reduce(k+R) after all ranks arrived at k+R, hence left
/// copy_out(k+R-3).
class Pipeline {
 public:
  Pipeline(SharedMesh& mesh, const BucketView& bucket, DType dtype, const Reduction& reduction)
      : mesh_(mesh),
        bucket_(bucket),
        dtype_(dtype),
        reduction_(reduction),
        n_(static_cast<size_t>(mesh.size())),
        sources_(n_) {
    const size_t share = (bucket.bytes() + n_ - 1) / n_;
    // With two ranks, neither uses its own part of its slots, so the other's part gets all the room.
    const size_t room = n_ == 2 ? 2 * mesh.chunk_bytes() : mesh.chunk_bytes();
    segment_ = std::min(room, (share + kLine - 1) / kLine * kLine);
    stripes_ = static_cast<uint32_t>((bucket.bytes() + segment_ * n_ - 1) / (segment_ * n_));
  }

  void run() {
    first_ = mesh_.begin_stripes(true);
    copy_in(0);
    for (uint32_t k = 0; k < stripes_; ++k) {
      if (k + 1 < stripes_) copy_in(k + 1);
      reduce_mine(k);
      if (k > 0) copy_out(k - 1);
    }
    copy_out(stripes_ - 1);
    mesh_.end_stripes(first_ + stripes_);
  }

 private:
  struct Range {
    size_t offset, bytes;
  };
  Range segment(uint32_t k, int owner) const {
    const size_t offset = std::min((k * n_ + static_cast<size_t>(owner)) * segment_, bucket_.bytes());
    return {offset, std::min(segment_, bucket_.bytes() - offset)};
  }

  void copy_in(uint32_t k) {
    for (int owner = 0; owner < mesh_.size(); ++owner) {
      if (owner == mesh_.rank()) continue;
      const Range range = segment(k, owner);
      std::byte* slot = place(k, mesh_.rank(), owner);
      bucket_.for_each(range.offset, range.bytes, [&](const Piece& part, size_t done) {
        if (n_ == 2) copy_bytes(slot + done, part.in, part.bytes);  // the peer has written here
        else SharedMesh::copy_to_slot(slot + done, part.in, part.bytes);
      });
    }
    mesh_.arrive(first_ + k);
  }

  /// The place of `owner`'s result. With two ranks it is the slot of the peer: the owner has just read those lines and
  /// the peer is about to read them. That measured twice as fast at 64 KiB as a separate place.
  std::byte* result(uint32_t k, int owner) {
    const int holder = mesh_.size() == 2 ? 1 - owner : owner;
    return place(k, holder, owner);
  }

  /// The place where `holder` keeps the bytes of stripe k that `owner` reduces.
  std::byte* place(uint32_t k, int holder, int owner) {
    return mesh_.size() == 2 ? mesh_.slot(holder, first_ + k) : mesh_.slot(holder, first_ + k, owner);
  }

  void reduce_mine(uint32_t k) {
    mesh_.await_arrived(first_ + k);
    const int me = mesh_.rank();
    const Range range = segment(k, me);
    std::byte* out = result(k, me);
    bucket_.for_each(range.offset, range.bytes, [&](const Piece& part, size_t done) {
      for (int peer = 0; peer < mesh_.size(); ++peer)
        sources_[static_cast<size_t>(peer)] = peer == me ? part.in : place(k, peer, me) + done;
      const size_t count = part.bytes / size_of(dtype_);
      if (n_ == 2) {
        reduce(dtype_, reduction_, part.out, sources_, count, out + done);
        return;
      }
      reduce(dtype_, reduction_, part.out, sources_, count);
      SharedMesh::copy_to_slot(out + done, part.out, part.bytes);
    });
    mesh_.finish(first_ + k);
  }

  void copy_out(uint32_t k) {
    mesh_.await_finished(first_ + k);
    for (int owner = 0; owner < mesh_.size(); ++owner) {
      if (owner == mesh_.rank()) continue;
      const Range range = segment(k, owner);
      const std::byte* from = result(k, owner);
      bucket_.for_each(range.offset, range.bytes,
                       [&](const Piece& part, size_t done) { copy_bytes(part.out, from + done, part.bytes); });
    }
  }

  SharedMesh& mesh_;
  const BucketView& bucket_;
  DType dtype_;
  const Reduction& reduction_;
  size_t n_;
  std::vector<const void*> sources_;
  size_t segment_ = 0;
  uint32_t stripes_ = 0;
  uint32_t first_ = 0;
};

}  // namespace

const char* shm_allreduce(SharedMesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction) {
  const BucketView bucket(pieces);
  if (bucket.bytes() == 0) return "nothing";
  // Every rank reads every rank's bytes, so the gain of the single step shrinks as ranks grow.
  if (bucket.bytes() * static_cast<size_t>(mesh.size()) <= kSmallBytes) {
    all_at_once(mesh, bucket, dtype, reduction);
    return "shm at once";
  }
  if (shm_direct_allreduce(mesh, bucket, dtype, reduction)) return "shm direct";
  Pipeline(mesh, bucket, dtype, reduction).run();
  return "shm slots";
}

}  // namespace farandole
