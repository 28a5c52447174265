#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "transport/link.h"
#include "transport/waiter.h"

namespace farandole {

/// One data link to every other rank, and what the algorithms over links need besides.
class Mesh {
 public:
  /// `links[r]` leads to rank r; the own entry is null.
  Mesh(int rank, std::vector<std::unique_ptr<Link>> links, Guard& guard, Patience patience)
      : rank_(rank), links_(std::move(links)), guard_(guard), patience_(patience) {}

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(links_.size()); }
  [[nodiscard]] Link& link(int peer) { return *links_[static_cast<size_t>(peer)]; }
  [[nodiscard]] Waiter waiter() { return Waiter(guard_, patience_); }

  /// At least `bytes` of scratch memory, kept between operations; the content is undefined.
  [[nodiscard]] std::byte* scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }

 private:
  int rank_;
  std::vector<std::unique_ptr<Link>> links_;
  Guard& guard_;
  Patience patience_;
  std::vector<std::byte> scratch_;
};

}  // namespace farandole
