#pragma once

#include <cstddef>
#include <vector>

#include "engine/plan.h"

namespace farandole {

/// What fusion looks at.
struct Fusible {
  Request request;
  Entry entry;
};

/// Puts operations that can run as one into one bucket of at most `threshold` bytes (0: nothing is fused).
///
/// Looks past operations of another type: what was ready in one round has no order that users could rely on, so
/// a mix of float16 and float32 gradients makes two buckets, not one per change of type. Buckets keep the order of
/// their first members, and their members the order of their numbers. An operation beyond the threshold runs alone.
/// Without `look_ahead` a bucket ends at the first operation of another type, so that the difference can be measured.
[[nodiscard]] std::vector<Bucket> fuse(std::vector<Fusible> ready, size_t threshold, bool look_ahead = true);

}  // namespace farandole
