// Fusion is a pure function: it keeps all operations, duplicates none, mixes no types, and obeys the threshold.
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "engine/fusion.h"

using namespace farandole;

namespace {

Fusible item(const std::string& name, Request request) {
  request.name = name;
  return {request, {name, kNoId, {}}};
}

Request allreduce(int64_t elements, DType dtype = DType::Float32) {
  Request request;
  request.kind = Kind::Allreduce;
  request.dtype = dtype;
  request.shape = {elements};
  return request;
}

std::vector<std::string> names_of(const Bucket& bucket) {
  std::vector<std::string> names;
  for (const Entry& entry : bucket.entries) names.push_back(entry.name);
  return names;
}

using Names = std::vector<std::string>;

void test_looks_past_other_types() {
  const std::vector<Bucket> buckets = fuse({item("a", allreduce(1)), item("b", allreduce(1, DType::Float16)),
                                            item("c", allreduce(1)), item("d", allreduce(1, DType::Float16))},
                                           1024);
  CHECK_EQ(buckets.size(), 2U);
  CHECK(names_of(buckets[0]) == (Names{"a", "c"}));
  CHECK(names_of(buckets[1]) == (Names{"b", "d"}));
}

void test_without_look_ahead() {
  const std::vector<Fusible> ready{item("a", allreduce(1)), item("b", allreduce(1)),
                                   item("c", allreduce(1, DType::Float16)), item("d", allreduce(1))};
  const std::vector<Bucket> buckets = fuse(ready, 1024, false);
  CHECK_EQ(buckets.size(), 3U);
  CHECK(names_of(buckets[0]) == (Names{"a", "b"}));
  CHECK(names_of(buckets[2]) == (Names{"d"}));
}

void test_devices_apart_from_host_memory() {
  for (const Kind kind : {Kind::Allreduce, Kind::Broadcast}) {
    Request host = allreduce(1);
    host.kind = kind;
    Request device = host;
    device.on_device = true;
    const std::vector<Bucket> buckets = fuse({item("a", host), item("b", device), item("c", host)}, 1024);
    CHECK_EQ(buckets.size(), 2U);
    CHECK(names_of(buckets[0]) == (Names{"a", "c"}));
  }
}

void test_threshold() {
  const std::vector<Fusible> ready{item("a", allreduce(4)), item("b", allreduce(4)), item("c", allreduce(1)),
                                   item("big", allreduce(100)), item("d", allreduce(1))};
  const std::vector<Bucket> buckets = fuse(ready, 32);
  CHECK_EQ(buckets.size(), 3U);
  CHECK(names_of(buckets[0]) == (Names{"a", "b"}));  // 16 + 16 bytes fit exactly
  CHECK(names_of(buckets[1]) == (Names{"c", "d"}));  // in one bucket across the large one
  CHECK(names_of(buckets[2]) == (Names{"big"}));
  CHECK_EQ(fuse(ready, 0).size(), ready.size());
  CHECK_EQ(fuse({}, 32).size(), 0U);
}

void test_factors_operations_and_roots_stay_apart() {
  Request scaled = allreduce(1);
  scaled.prescale = 0.5;
  Request least = allreduce(1);
  least.op = ReduceOp::Min;
  CHECK_EQ(fuse({item("a", allreduce(1)), item("b", scaled), item("c", least)}, 1024).size(), 3U);

  Request from_0 = allreduce(1);
  from_0.kind = Kind::Broadcast;
  Request from_1 = from_0;
  from_1.root = 1;
  Request other_type = from_0;
  other_type.dtype = DType::Int64;
  const std::vector<Bucket> buckets = fuse({item("a", from_0), item("b", from_1), item("c", other_type)}, 1024);
  CHECK_EQ(buckets.size(), 2U);
  CHECK(names_of(buckets[0]) == (Names{"a", "c"}));  // a broadcast moves bytes of any type
}

void test_every_mix() {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const size_t threshold = random() % 3 == 0 ? 0 : random() % 4096;
    std::vector<Fusible> ready;
    std::map<std::string, Request> requests;
    for (size_t i = random() % 30; i > 0; --i) {
      Request request = allreduce(random() % 300, random() % 2 == 0 ? DType::Float32 : DType::Float16);
      request.kind = static_cast<Kind>(random() % kKinds);
      request.root = static_cast<int32_t>(random() % 2);
      request.prescale = random() % 4 == 0 ? 0.5 : 1;
      const std::string name = "t" + std::to_string(i);
      ready.push_back(item(name, request));
      requests[name] = ready.back().request;
    }
    size_t seen = 0;
    for (const Bucket& bucket : fuse(ready, threshold)) {
      CHECK(!bucket.entries.empty());
      const Request& first = requests.at(bucket.entries[0].name);
      size_t bytes = 0;
      for (const Entry& entry : bucket.entries) {
        const Request& request = requests.at(entry.name);
        bytes += request.bytes();
        CHECK(request.kind == bucket.kind &&
              request.root * (bucket.kind == Kind::Broadcast) == first.root * (bucket.kind == Kind::Broadcast));
        if (bucket.kind == Kind::Allreduce) CHECK(request.dtype == first.dtype && request.prescale == first.prescale);
      }
      seen += bucket.entries.size();
      const bool may_fuse = bucket.kind == Kind::Allreduce || bucket.kind == Kind::Broadcast;
      CHECK(bucket.entries.size() == 1 || (may_fuse && bytes <= threshold));
    }
    CHECK_EQ(seen, requests.size());
  }
}

}  // namespace

int main() {
  test_looks_past_other_types();
  test_without_look_ahead();
  test_devices_apart_from_host_memory();
  test_threshold();
  test_factors_operations_and_roots_stay_apart();
  test_every_mix();
  return check::report();
}
