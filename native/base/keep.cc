#include "base/keep.h"

#include <mutex>
#include <utility>
#include <vector>

namespace farandole {

void keep_for_ever(std::shared_ptr<void> memory) {
  static std::mutex mu;
  static auto* kept = new std::vector<std::shared_ptr<void>>();
  const std::lock_guard lock(mu);
  kept->push_back(std::move(memory));
}

}  // namespace farandole
