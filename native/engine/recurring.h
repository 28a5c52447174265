#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/operation.h"
#include "engine/plan.h"

namespace farandole {

/// Operations that this rank requests together, perhaps repeatedly: one, or the members of a group. Their requests do
/// not change between calls, so facts about them are cached here.
struct Recurring {
  std::vector<OperationPtr> operations;

  /// Ends of the runs of operations that share a bucket; set by arrange().
  std::vector<size_t> buckets;
  size_t bytes = 0;  // of all operations; set by arrange()

  /// The number that Pending found, and its count of numbers then.
  uint32_t number = kNoId;
  uint64_t numbered = 0;

  /// Puts members of one type next to each other, in the same order on every rank with the same requests. Call it
  /// whenever requests have changed.
  void arrange();
};

}  // namespace farandole
