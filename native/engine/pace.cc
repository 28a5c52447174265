#include "engine/pace.h"

namespace farandole {

void Pace::restart() {
  seen_.clear();
  marks_.clear();
}

void Pace::add(std::span<const OperationPtr> operations, uint64_t now_ns, uint64_t bytes) {
  if (marks_.size() == kMost) return;
  bool passed = false;
  for (const OperationPtr& operation : operations) {
    if (seen_.size() == kMostNames) seen_.clear();
    // One transfer may hold operations of two steps, but it ends once.
    passed |= ++seen_[operation->request.name] > marks_.size();
  }
  if (passed) marks_.push_back({now_ns, bytes});
}

}  // namespace farandole
