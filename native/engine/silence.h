#pragma once

#include <algorithm>
#include <cstdint>

namespace farandole {

/// Time for which a peer has been silent, counted only while this rank was checking. If our own process or host was
/// stopped, the peer may have sent data that we have not read. Pure: the caller passes the time.
class Silence {
 public:
  /// `limit` is the longest silence, in nanoseconds.
  explicit Silence(uint64_t limit) : limit_(limit) {}

  /// Advances the time; call it often. A gap between calls counts as at most a quarter of the limit. So a stopped rank
  /// gets time to read the peer's data afterwards, and on a busy machine silence is still noticed.
  void look(uint64_t now) {
    const uint64_t gap = std::min(now - checked_, limit_ / 4);
    checked_ = now;
    silent_ = begun_ ? silent_ + gap : 0;
  }

  /// Notes a sign of life. Silence is measured from the first one on, because the peer may start later.
  void note_life() {
    begun_ = true;
    silent_ = 0;
  }

  [[nodiscard]] bool is_over_limit() const { return silent_ >= limit_; }

  /// Time until the limit is reached.
  [[nodiscard]] uint64_t left() const { return is_over_limit() ? 0 : limit_ - silent_; }

 private:
  uint64_t limit_;
  uint64_t checked_ = 0;
  uint64_t silent_ = 0;
  bool begun_ = false;
};

}  // namespace farandole
