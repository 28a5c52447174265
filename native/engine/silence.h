#pragma once

#include <algorithm>
#include <cstdint>

namespace farandole {

/// How long a peer has been silent, in time during which we ourselves were looking: when our own process or host stood
/// still, the peer may have spoken without our hearing it. Pure: told what time it is.
class Silence {
 public:
  /// `limit` is the longest silence, in nanoseconds.
  explicit Silence(uint64_t limit) : limit_(limit) {}

  /// To be called often. Time in which nobody looked counts as a quarter of the limit at most: after standing still
  /// there is time left for what the peer has sent meanwhile, and on a busy machine silence is noticed all the same.
  void look(uint64_t now) {
    const uint64_t gap = std::min(now - looked_, limit_ / 4);
    looked_ = now;
    silent_ = begun_ ? silent_ + gap : 0;
  }

  /// The peer has said something. Only from its first word on is its silence measured: it may start later than we do.
  void hear() {
    begun_ = true;
    silent_ = 0;
  }

  [[nodiscard]] bool is_over_limit() const { return silent_ >= limit_; }

  /// After which time without a word the limit is reached.
  [[nodiscard]] uint64_t left() const { return is_over_limit() ? 0 : limit_ - silent_; }

 private:
  uint64_t limit_;
  uint64_t looked_ = 0;
  uint64_t silent_ = 0;
  bool begun_ = false;
};

}  // namespace farandole
