#include "engine/fusion.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace farandole {
namespace {

using Key = std::tuple<Kind, DType, ReduceOp, double, double, int32_t, bool, bool, bool>;

/// Returns whether fusing such operations is faster.
bool fuses(const Request& request) {
  const KindTraits& traits = traits_of(request.kind);
  return traits.fuses || (request.on_device && traits.has_tensor());
}

/// Operations with equal keys can share a bucket. The type does not matter to operations that move bytes. Operations on
/// GPUs and in host memory do not share buckets.
Key key_of(const Fusible& item) {
  const Request& request = item.request;
  const bool with_joined = item.entry.request.has_value();
  const bool has_result = !item.entry.result.empty();
  if (!traits_of(request.kind).reduces)
    return {request.kind, DType::UInt8, ReduceOp::Sum, 1, 1, request.root, with_joined, request.on_device, has_result};
  return {request.kind, request.dtype,     request.op, request.prescale, request.postscale, 0,
          with_joined,  request.on_device, has_result};
}

}  // namespace

std::vector<Bucket> fuse(std::vector<Fusible> ready, size_t threshold, bool look_ahead) {
  struct Open {
    size_t index;
    size_t bytes;
  };
  std::vector<Bucket> buckets;
  std::map<Key, Open> open;
  for (Fusible& item : ready) {
    const size_t bytes = item.request.bytes();
    const Key key = key_of(item);
    if (!look_ahead) std::erase_if(open, [&](const auto& each) { return each.first != key; });
    if (fuses(item.request) && bytes <= threshold) {
      const auto [found, fresh] = open.try_emplace(key, Open{buckets.size(), 0});
      if (!fresh && found->second.bytes + bytes <= threshold) {
        found->second.bytes += bytes;
        buckets[found->second.index].entries.push_back(std::move(item.entry));
        continue;
      }
      found->second = {buckets.size(), bytes};
    }
    buckets.push_back({item.request.kind, {}});
    buckets.back().entries.push_back(std::move(item.entry));
  }
  // In the order of their numbers, entries take few bytes of the plan, and every step reduces them in the same order.
  const auto by_number = [](const Entry& a, const Entry& b) { return a.id < b.id; };
  for (Bucket& bucket : buckets) std::stable_sort(bucket.entries.begin(), bucket.entries.end(), by_number);
  return buckets;
}

}  // namespace farandole
