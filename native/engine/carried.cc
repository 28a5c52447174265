#include "engine/carried.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/int8_blocks.h"
#include "base/reduce.h"
#include "engine/execute.h"

namespace farandole {

bool can_carry(const Request& request) {
  const size_t bytes = request.bytes();
  return request.kind == Kind::Allreduce && is_elementwise(request.op) && !request.on_device && bytes > 0 &&
         bytes <= kCarriedBytes;
}

Bytes reduce_carried(const Request& request, std::span<const Bytes> inputs) {
  if (std::ranges::any_of(inputs, &Bytes::empty)) return {};
  std::vector<const void*> sources;
  sources.reserve(inputs.size());
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes result(request.bytes());
  const auto size = static_cast<int>(inputs.size());
  reduce(request.dtype, reduction_of(request, size), result.data(), sources, request.elements());
  return result;
}

bool has_results(const Bucket& bucket) { return !bucket.entries.empty() && !bucket.entries.front().result.empty(); }

void store_results(const Bucket& bucket, std::span<const OperationPtr> operations) {
  for (size_t i = 0; i < operations.size(); ++i) {
    Operation& operation = *operations[i];
    if (i >= bucket.entries.size() || bucket.entries[i].result.size() != operation.request.bytes() ||
        !can_carry(operation.request))
      throw Error::internal("a plan's result does not match its operation");
    std::memcpy(operation.output, bucket.entries[i].result.data(), bucket.entries[i].result.size());
  }
}

}  // namespace farandole
