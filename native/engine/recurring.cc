#include "engine/recurring.h"

#include <algorithm>

namespace farandole {

void Recurring::arrange() {
  const auto type_of = [](const OperationPtr& operation) { return operation->request.dtype; };
  // The sort allocates memory, also for one operation.
  if (operations.size() > 1) std::ranges::stable_sort(operations, {}, type_of);
  buckets.clear();
  bytes = 0;
  for (size_t i = 0; i < operations.size(); ++i) {
    // A barrier has no tensor, though its request has the shape of a scalar.
    if (const Request& request = operations[i]->request; traits_of(request.kind).has_tensor()) bytes += request.bytes();
    if (i + 1 == operations.size() || type_of(operations[i]) != type_of(operations[i + 1])) buckets.push_back(i + 1);
  }
  number = kNoId;
  numbered = 0;
}

}  // namespace farandole
