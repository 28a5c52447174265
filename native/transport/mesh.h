#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "transport/link.h"
#include "transport/waiter.h"

namespace farandole {

/// Data links to the other ranks, with the guard, policy and scratch memory of algorithms over links.
class Mesh {
 public:
  /// `links[r]` leads to rank r; this rank's own entry is null.
  Mesh(int rank, std::vector<std::unique_ptr<Link>> links, Guard& guard, WaitPolicy policy)
      : rank_(rank), links_(std::move(links)), guard_(guard), policy_(policy) {}

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(links_.size()); }
  [[nodiscard]] Link& link(int peer) { return *links_[static_cast<size_t>(peer)]; }
  /// The largest chunk of a chunked transfer. Equal on all ranks, as is small_bytes().
  [[nodiscard]] size_t chunk_bytes() const { return chunk_bytes_; }
  /// The most bytes that a rank receives in a transfer of one step; larger transfers are chunked.
  [[nodiscard]] size_t small_bytes() const { return small_bytes_; }
  void use_sizes(size_t chunk_bytes, size_t small_bytes) {
    chunk_bytes_ = chunk_bytes;
    small_bytes_ = small_bytes;
  }

  [[nodiscard]] const Guard& guard() const { return guard_; }
  [[nodiscard]] Waiter waiter() { return Waiter(guard_, policy_); }

  /// At least `bytes` of scratch memory, reused by later operations; uninitialized.
  [[nodiscard]] std::byte* scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }

 private:
  int rank_;
  std::vector<std::unique_ptr<Link>> links_;
  Guard& guard_;
  WaitPolicy policy_;
  // Larger chunks leave the second-level cache between arrival and use; smaller ones need more system calls. Up to
  // small_bytes_, one step with more bytes is faster than two steps with fewer (bench/native_link.cc).
  size_t chunk_bytes_ = size_t{256} << 10;
  size_t small_bytes_ = size_t{64} << 10;
  std::vector<std::byte> scratch_;
};

}  // namespace farandole
