#pragma once

#include <cstddef>
#include <vector>

#include "engine/plan.h"

namespace farandole {

/// Input of fusion: a request, and its entry in a plan.
struct Fusible {
  Request request;
  Entry entry;
};

/// Puts operations that can run as one into buckets of at most `threshold` bytes; 0 disables fusion.
///
/// Looks past operations of another type: requests that became ready together have no order that users could rely on.
/// So a mix of float16 and float32 gradients makes two buckets, not one per change of type. Buckets are ordered by
/// their first members, members by their numbers. An operation above the threshold runs alone. Without `look_ahead` a
/// bucket ends at the first operation of another type, to measure the difference.
[[nodiscard]] std::vector<Bucket> fuse(std::vector<Fusible> ready, size_t threshold, bool look_ahead = true);

}  // namespace farandole
