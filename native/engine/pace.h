#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/operation.h"

namespace farandole {

/// Finds the steps of a training loop among the operations: one has passed when some operation comes, by name, more
/// often than any has before. Pure, without clocks; made for samples, so it stops at kMost of them.
class Pace {
 public:
  static constexpr size_t kMost = 4096;

  struct Mark {
    uint64_t ns;
    uint64_t bytes;  // of all operations so far
  };

  /// Forgets what it has seen.
  void restart();

  /// `operations` ended at `now_ns`, when so many bytes had been reduced since any time.
  void add(std::span<const OperationPtr> operations, uint64_t now_ns, uint64_t bytes);

  [[nodiscard]] const std::vector<Mark>& marks() const { return marks_; }

 private:
  static constexpr size_t kMostNames = 1 << 16;  // more are no steps

  std::unordered_map<std::string, size_t> seen_;
  std::vector<Mark> marks_;
};

}  // namespace farandole
