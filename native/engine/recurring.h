#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/operation.h"
#include "engine/plan.h"

namespace farandole {

/// Operations that this rank asks for together, perhaps again and again: one, or the members of a group. Their requests
/// stay as they are from one time to the next, so what was found out about them stays true.
struct Recurring {
  std::vector<OperationPtr> operations;

  /// Where each run of operations that go as one bucket ends; set by arrange().
  std::vector<size_t> buckets;
  size_t bytes = 0;  // of all; set by arrange()

  /// What Pending knows of the requests, and how many numbers it had given then.
  uint32_t number = kNoId;
  uint64_t numbered = 0;

  /// Puts members of one type next to each other, the same on every rank that has asked for the same. To be called
  /// whenever requests have changed.
  void arrange();
};

}  // namespace farandole
