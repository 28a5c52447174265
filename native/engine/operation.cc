#include "engine/operation.h"

namespace farandole {

void Operation::renew() {
  error.reset();
  result.reset();
  result_shape.clear();
  received_splits.clear();
  last_joined = -1;
  done_.store(false, std::memory_order_relaxed);
}

}  // namespace farandole
