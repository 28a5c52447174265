#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/operation.h"

namespace farandole {

/// Finds the steps of a training loop among the operations: a step has passed when the count of some name exceeds all
/// counts so far. Pure, without clocks. Meant for samples, so it stops at kMost steps.
class Pace {
 public:
  static constexpr size_t kMost = 4096;

  struct Mark {
    uint64_t ns;
    uint64_t bytes;  // of all operations so far
  };

  /// Resets all counts.
  void restart();

  /// Notes that `operations` completed at `now_ns`, after `bytes` reduced bytes in total.
  void add(std::span<const OperationPtr> operations, uint64_t now_ns, uint64_t bytes);

  [[nodiscard]] const std::vector<Mark>& marks() const { return marks_; }

 private:
  static constexpr size_t kMostNames = 1 << 16;  // a loop with more names has no steps

  std::unordered_map<std::string, size_t> seen_;
  std::vector<Mark> marks_;
};

}  // namespace farandole
