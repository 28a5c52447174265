#include <algorithm>
#include <vector>

#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"

namespace farandole {
namespace {

constexpr size_t kSmallestChunk = 16 << 10;

// From this size per rank on, all links of a chain are busy most of the time.
constexpr size_t kChainBytesPerRank = 512 << 10;

/// The neighbours of a rank in a tree.
struct Place {
  int parent = -1;
  std::vector<int> children;
};

Place place_in_chain(int position, int size) {
  Place place{position - 1, {}};
  if (position + 1 < size) place.children.push_back(position + 1);
  return place;
}

Place place_in_binomial_tree(int position, int size) {
  Place place{position == 0 ? -1 : position & (position - 1), {}};
  int reach = 1;
  while (reach < size && (position & reach) == 0) reach *= 2;
  // The child with the largest subtree comes first, because its branch takes longest.
  for (int step = reach / 2; step > 0; step /= 2)
    if (position + step < size) place.children.push_back(position + step);
  return place;
}

/// Passes a bucket from a parent (or from this rank's inputs) to children, chunk by chunk.
class Relay {
 public:
  Relay(Mesh& mesh, const BucketView& bucket, const Place& place)
      : mesh_(mesh),
        bucket_(bucket),
        chunk_bytes_(std::clamp(whole_lines(bucket.bytes() / 8), std::min(kSmallestChunk, mesh.chunk_bytes()),
                                mesh.chunk_bytes())),
        chunks_((bucket.bytes() + chunk_bytes_ - 1) / chunk_bytes_),
        root_(place.parent < 0),
        arrived_(root_ ? chunks_ : 0) {
    std::byte* scratch = mesh.scratch((place.children.size() + 1) * chunk_bytes_);
    staging_ = scratch;
    if (!root_) in_.link = &mesh.link(place.parent);
    for (const int child : place.children) {
      scratch += chunk_bytes_;
      branches_.push_back({Outgoing{&mesh.link(child), nullptr, 0}, 0, scratch});
    }
  }

  void run() {
    LinkWaiter waiter(mesh_);
    for (;;) {
      bool moved = pull();
      for (Branch& branch : branches_) moved |= push(branch);
      const auto sent = [&](const Branch& branch) { return branch.sent == chunks_; };
      if (arrived_ == chunks_ && std::ranges::all_of(branches_, sent)) return;
      if (moved) {
        waiter.moved();
        continue;
      }
      if (arrived_ < chunks_) waiter.want(in_.link->peer(), true, false);
      for (const Branch& branch : branches_) waiter.want(branch.out.link->peer(), false, branch.out.left != 0);
      waiter.pause();
    }
  }

 private:
  struct Branch {
    Outgoing out;
    size_t sent;  // chunks
    std::byte* staging;
  };

  [[nodiscard]] size_t bytes_of(size_t chunk) const {
    return std::min(chunk_bytes_, bucket_.bytes() - chunk * chunk_bytes_);
  }

  [[nodiscard]] bool pull() {
    if (arrived_ == chunks_) return false;
    const size_t offset = arrived_ * chunk_bytes_;
    const size_t bytes = bytes_of(arrived_);
    if (in_.left == 0) {
      in_.at = output_place(bucket_, offset, bytes, staging_);
      in_.left = bytes;
    }
    const bool moved = in_.pull();
    if (in_.left == 0) {
      write_output(bucket_, offset, bytes, in_.at - bytes, staging_);
      ++arrived_;
    }
    return moved;
  }

  [[nodiscard]] bool push(Branch& branch) {
    if (branch.sent == arrived_) return false;
    if (branch.out.left == 0) {
      const size_t offset = branch.sent * chunk_bytes_;
      branch.out.left = bytes_of(branch.sent);
      branch.out.at = root_ ? input_run(bucket_, offset, branch.out.left, branch.staging)
                            : output_run(bucket_, offset, branch.out.left, branch.staging);
    }
    const bool moved = branch.out.push();
    if (branch.out.left == 0) ++branch.sent;
    return moved;
  }

  Mesh& mesh_;
  const BucketView& bucket_;
  size_t chunk_bytes_;
  size_t chunks_;
  bool root_;
  size_t arrived_;  // chunks
  std::byte* staging_ = nullptr;
  Incoming in_;
  std::vector<Branch> branches_;
};

}  // namespace

void link_broadcast(Mesh& mesh, std::span<const Piece> pieces, int root) {
  const BucketView bucket(pieces);
  if (bucket.bytes() == 0) return;
  const int size = mesh.size();
  const int position = (mesh.rank() - root + size) % size;
  const bool chain = bucket.bytes() >= kChainBytesPerRank * static_cast<size_t>(size);
  Place place = chain ? place_in_chain(position, size) : place_in_binomial_tree(position, size);
  const auto rank_at = [&](int there) { return (there + root) % size; };
  if (place.parent >= 0) place.parent = rank_at(place.parent);
  std::ranges::transform(place.children, place.children.begin(), rank_at);
  Relay(mesh, bucket, place).run();
  if (place.parent < 0) copy_through(bucket);
}

}  // namespace farandole
