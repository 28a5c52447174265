#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace farandole {

/// One tensor of a bucket: contiguous bytes. `in` may equal `out`.
struct Piece {
  const std::byte* in;
  std::byte* out;
  size_t bytes;
};

/// The concatenation of a bucket's pieces as one range of bytes, without packing them.
class BucketView {
 public:
  explicit BucketView(std::span<const Piece> pieces) : pieces_(pieces) {
    ends_.reserve(pieces.size());
    for (const Piece& piece : pieces) ends_.push_back(bytes_ += piece.bytes);
  }

  [[nodiscard]] size_t bytes() const { return bytes_; }
  [[nodiscard]] std::span<const Piece> pieces() const { return pieces_; }

  /// Calls `visit(part, done)` for each contiguous part of the bytes [offset, offset + bytes). `part` is a Piece cut to
  /// the range; `done` is the number of bytes of the range before it.
  template <class Visit>
  void for_each(size_t offset, size_t bytes, Visit visit) const {
    auto index = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), offset) - ends_.begin());
    for (size_t done = 0; done < bytes; ++index) {
      const Piece& piece = pieces_[index];
      const size_t skip = offset + done - (ends_[index] - piece.bytes);
      const size_t part = std::min(piece.bytes - skip, bytes - done);
      if (part > 0) visit(Piece{piece.in + skip, piece.out + skip, part}, done);
      done += part;
    }
  }

 private:
  std::span<const Piece> pieces_;
  std::vector<size_t> ends_;
  size_t bytes_ = 0;
};

}  // namespace farandole
