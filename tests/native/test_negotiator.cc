// The negotiator is pure: simulated with any number of ranks, without threads, sockets or clocks.
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "engine/negotiator.h"

using namespace farandole;

namespace {

Request request_of(const std::string& name, Kind kind = Kind::Allreduce, std::vector<int64_t> shape = {4}) {
  Request request;
  request.name = name;
  request.kind = kind;
  request.dtype = DType::Float32;
  request.shape = std::move(shape);
  request.cacheable = true;
  return request;
}

std::vector<Bucket> buckets_of(const Plan& plan) {
  std::vector<Bucket> buckets;
  for (const auto& item : plan)
    if (const auto* bucket = std::get_if<Bucket>(&item)) buckets.push_back(*bucket);
  return buckets;
}

std::vector<Refusal> refusals_of(const Plan& plan) {
  std::vector<Refusal> refusals;
  for (const auto& item : plan)
    if (const auto* refusal = std::get_if<Refusal>(&item)) refusals.push_back(*refusal);
  return refusals;
}

void test_order_of_arrival_changes_nothing() {
  for (int size = 1; size <= 3; ++size) {
    std::vector<std::pair<int, std::string>> arrivals;
    for (int rank = 0; rank < size; ++rank)
      for (const char* name : {"a", "b"}) arrivals.emplace_back(rank, name);
    std::sort(arrivals.begin(), arrivals.end());
    do {
      Negotiator negotiator({.size = size});
      std::map<std::string, int> asked;
      std::set<std::string> released;
      for (const auto& [rank, name] : arrivals) {
        negotiator.add(rank, request_of(name), 0);
        const Plan plan = negotiator.decide(0);
        // Ready exactly when the last rank has made the request.
        if (++asked[name] < size) CHECK(plan.empty());
        for (const Bucket& bucket : buckets_of(plan))
          for (const Entry& entry : bucket.entries) CHECK(entry.name == name && released.insert(name).second);
      }
      CHECK_EQ(released.size(), 2U);
      CHECK_EQ(negotiator.waiting(), 0U);
    } while (std::next_permutation(arrivals.begin(), arrivals.end()));
  }
}

void test_each_disagreement_is_named() {
  struct Case {
    const char* what;
    const char* text;
    std::function<void(Request&)> change;
  };
  const std::vector<Case> cases{
      {"operation", "broadcast", [](Request& r) { r.kind = Kind::Broadcast; }},
      {"dtype", "float16[4]", [](Request& r) { r.dtype = DType::Float16; }},
      {"shape", "float32[4, 2]", [](Request& r) { r.shape = {4, 2}; }},
      {"reduce op", "min", [](Request& r) { r.op = ReduceOp::Min; }},
      {"scale factors", "prescale 0.5, postscale 1", [](Request& r) { r.prescale = 0.5; }},
      {"group", "g of 2", [](Request& r) { r.group = "g", r.group_size = 2; }},
  };
  for (const Case& one : cases) {
    for (int odd = 0; odd < 3; ++odd) {
      Negotiator negotiator({.size = 3});
      for (int rank = 0; rank < 3; ++rank) {
        Request request = request_of("w");
        if (rank == odd) one.change(request);
        negotiator.add(rank, request, 0);
      }
      const Plan plan = negotiator.decide(0);
      const std::vector<Refusal> refusals = refusals_of(plan);
      CHECK_EQ(plan.size(), 1U);
      CHECK_EQ(refusals.size(), 1U);
      const Error& error = refusals[0].error;
      CHECK(error.kind == ErrorKind::Mismatch && error.name == "w");
      CHECK_EQ(error.what_differs, one.what);
      CHECK_EQ(error.asked.at(odd), one.text);
      CHECK_EQ(error.asked.size(), 3U);
      // The job continues, with the same name.
      for (int rank = 0; rank < 3; ++rank) negotiator.add(rank, request_of("w"), 0);
      CHECK_EQ(buckets_of(negotiator.decide(0)).size(), 1U);
    }
  }
  Negotiator negotiator({.size = 2});
  Request root = request_of("w", Kind::Broadcast);
  negotiator.add(0, root, 0);
  root.root = 1;
  negotiator.add(1, root, 0);
  CHECK_EQ(refusals_of(negotiator.decide(0)).at(0).error.what_differs, "root rank");
}

void test_ragged_sizes_reach_the_plan() {
  Negotiator negotiator({.size = 2});
  negotiator.add(1, request_of("gather", Kind::Allgather, {5, 2}), 0);
  negotiator.add(0, request_of("gather", Kind::Allgather, {0, 2}), 0);
  const Bucket gather = buckets_of(negotiator.decide(0)).at(0);
  CHECK(gather.entries.at(0).sizes == (std::vector<int64_t>{0, 5}));
  CHECK_EQ(gather.entries.at(0).id, kNoId);  // the next one may have other sizes

  Request mine = request_of("swap", Kind::Alltoall, {3});
  mine.splits = {1, 2};
  Request even = request_of("swap", Kind::Alltoall, {4});
  negotiator.add(0, mine, 0);
  negotiator.add(1, even, 0);
  CHECK(buckets_of(negotiator.decide(0)).at(0).entries.at(0).sizes == (std::vector<int64_t>{1, 2, 2, 2}));

  negotiator.add(0, request_of("gather", Kind::Allgather, {5, 2}), 0);
  negotiator.add(1, request_of("gather", Kind::Allgather, {5, 3}), 0);
  CHECK_EQ(refusals_of(negotiator.decide(0)).at(0).error.what_differs, "shape");
}

void test_numbers() {
  Negotiator negotiator({.size = 2});
  for (int rank = 0; rank < 2; ++rank) negotiator.add(rank, request_of("w"), 0);
  const Entry first = buckets_of(negotiator.decide(0)).at(0).entries.at(0);
  CHECK(first.name == "w" && first.id != kNoId);
  negotiator.add(0, first.id, 1);
  CHECK_EQ(negotiator.waiting(), 1U);
  CHECK(negotiator.decide(1).empty());
  negotiator.add(1, first.id, 1);
  CHECK(buckets_of(negotiator.decide(1)).at(0).entries.at(0) == (Entry{"", first.id, {}}));

  // One rank by number, the other in full: equal, in both orders.
  for (int spells = 0; spells < 2; ++spells) {
    for (int rank = 0; rank < 2; ++rank) {
      if (rank == spells) negotiator.add(rank, request_of("w"), 2);
      else negotiator.add(rank, first.id, 2);
    }
    CHECK_EQ(buckets_of(negotiator.decide(2)).at(0).entries.at(0).id, first.id);
    CHECK_EQ(negotiator.waiting(), 0U);
  }

  // A number stands for a signature: a different signature is a disagreement.
  negotiator.add(0, first.id, 3);
  negotiator.add(1, request_of("w", Kind::Allreduce, {9}), 3);
  CHECK_EQ(refusals_of(negotiator.decide(3)).at(0).error.what_differs, "shape");

  // Another signature on all ranks gets its own number.
  for (int rank = 0; rank < 2; ++rank) negotiator.add(rank, request_of("w", Kind::Allreduce, {9}), 4);
  CHECK(buckets_of(negotiator.decide(4)).at(0).entries.at(0).id != first.id);
}

Bytes bytes_of(const std::vector<float>& values) {
  const auto* begin = reinterpret_cast<const std::byte*>(values.data());
  return {begin, begin + values.size() * sizeof(float)};
}

void test_inputs_of_all_ranks_are_reduced() {
  Negotiator negotiator({.size = 3});
  const auto ask_in_full = [&](const std::string& name) {
    for (int rank = 0; rank < 3; ++rank) negotiator.add(rank, request_of(name), 0);
    return buckets_of(negotiator.decide(0)).at(0);
  };
  CHECK_EQ(ask_in_full("w").entries.at(0).id, 0U);
  CHECK_EQ(ask_in_full("v").entries.at(0).id, 1U);
  const auto carry = [&](int rank, uint32_t id) {
    const auto value = static_cast<float>(rank + 1);
    negotiator.add(rank, id, bytes_of({value, 10 * value, 100 * value, 1}), 0);
  };
  const Entry sum{{}, 0, {}, 1, std::nullopt, bytes_of({6, 60, 600, 3})};
  const Entry number{{}, 0, {}};
  for (int turn = 0; turn < 2; ++turn) {
    for (const int rank : {2, 0, 1}) carry(rank, 0);
    CHECK(buckets_of(negotiator.decide(0)) == (std::vector{Bucket{Kind::Allreduce, {sum}}}));
    // Without the input of one rank, the ranks exchange the data. Operations of the two ways run apart.
    for (const int rank : {0, 1, 2}) carry(rank, 1);
    carry(0, 0);
    negotiator.add(1, 0, 0);
    carry(2, 0);
    const std::vector<Bucket> buckets = buckets_of(negotiator.decide(0));
    CHECK_EQ(buckets.size(), 2U);
    CHECK(buckets[0].entries.at(0).result == sum.result && buckets[0].entries[0].id == 1);
    CHECK(buckets[1].entries == std::vector{number});
  }
  // In full from one rank, by number from others: what was carried counts for nothing, then or later.
  carry(0, 0);
  negotiator.add(1, request_of("w"), 0);
  carry(2, 0);
  CHECK(buckets_of(negotiator.decide(0)).at(0).entries.at(0).result.empty());
  carry(0, 0);
  negotiator.add(1, 0, 0);
  negotiator.add(2, 0, 0);
  CHECK(buckets_of(negotiator.decide(0)).at(0).entries == std::vector{number});

  for (const size_t elements : {0, 3, 5}) {
    const auto wrong = [&] { negotiator.add(0, 0, Bytes(4 * elements), 0); };
    CHECK(CHECK_THROWS(Error, wrong()).kind == ErrorKind::Internal);
  }
  CHECK(CHECK_THROWS(Error, carry(0, 99)).kind == ErrorKind::Internal);
  for (int rank = 0; rank < 3; ++rank) negotiator.add(rank, request_of("b", Kind::Broadcast), 0);
  const uint32_t broadcast = buckets_of(negotiator.decide(0)).at(0).entries.at(0).id;
  CHECK(CHECK_THROWS(Error, carry(0, broadcast)).kind == ErrorKind::Internal);
}

void test_full_cache_still_works() {
  Negotiator negotiator({.size = 1, .cache_capacity = 1});
  negotiator.add(0, request_of("a"), 0);
  negotiator.add(0, request_of("b"), 0);
  const Plan plan = negotiator.decide(0);
  CHECK_EQ(buckets_of(plan).at(0).entries.size(), 2U);
  CHECK_EQ(buckets_of(plan).at(0).entries.at(1).id, kNoId);
  negotiator.add(0, request_of("b"), 0);
  CHECK_EQ(buckets_of(negotiator.decide(0)).size(), 1U);
}

void test_groups_run_whole() {
  Negotiator negotiator({.size = 2, .fusion_threshold = 0});
  const auto member = [](const std::string& name) {
    Request request = request_of(name);
    request.group = "g";
    request.group_size = 2;
    return request;
  };
  for (int rank = 0; rank < 2; ++rank) negotiator.add(rank, member("a"), 0);
  for (int rank = 0; rank < 2; ++rank) negotiator.add(rank, request_of("alone"), 0);
  CHECK_EQ(buckets_of(negotiator.decide(0)).size(), 1U);  // "alone" does not wait for the group
  for (int rank = 0; rank < 2; ++rank) negotiator.add(rank, member("b"), 0);
  CHECK_EQ(buckets_of(negotiator.decide(0)).size(), 2U);

  // A refused member releases the rest of its group.
  Request other = member("a");
  other.dtype = DType::Float64;
  negotiator.add(0, member("a"), 0);
  negotiator.add(1, other, 0);
  for (int rank = 0; rank < 2; ++rank) negotiator.add(rank, member("b"), 0);
  const Plan plan = negotiator.decide(0);
  CHECK(refusals_of(plan).size() == 1 && buckets_of(plan).size() == 1);
}

void test_timeouts_name_the_missing() {
  Negotiator negotiator({.size = 4, .timeout = 10});
  negotiator.add(1, request_of("w"), 100);
  negotiator.add(3, request_of("w"), 105);
  CHECK(negotiator.decide(109).empty());
  const std::vector<Refusal> refusals = refusals_of(negotiator.decide(110.5));
  CHECK_EQ(refusals.size(), 1U);
  CHECK(refusals.at(0).error.kind == ErrorKind::Timeout);
  CHECK(refusals.at(0).error.ranks == (std::vector<int>{0, 2}));
  CHECK_EQ(refusals.at(0).error.waited, 10.5);
  CHECK_EQ(negotiator.waiting(), 0U);

  // The same by number; the number remains valid.
  for (int rank = 0; rank < 4; ++rank) negotiator.add(rank, request_of("w"), 200);
  const uint32_t id = buckets_of(negotiator.decide(200)).at(0).entries.at(0).id;
  negotiator.add(2, id, 300);
  CHECK(refusals_of(negotiator.decide(311)).at(0).error.ranks == (std::vector<int>{0, 1, 3}));
  for (int rank = 0; rank < 4; ++rank) negotiator.add(rank, id, 400);
  CHECK_EQ(buckets_of(negotiator.decide(400)).at(0).entries.at(0).id, id);

  Negotiator patient({.size = 2, .timeout = 0});
  patient.add(0, request_of("w"), 0);
  CHECK(patient.decide(1e9).empty());
}

void test_stalls_name_who_asked_and_who_did_not() {
  Negotiator negotiator({.size = 3});
  for (int rank = 0; rank < 3; ++rank) negotiator.add(rank, request_of("known"), 0);
  const Plan plan = negotiator.decide(0);
  negotiator.add(2, buckets_of(plan)[0].entries[0].id, 5);
  for (const int rank : {0, 2}) negotiator.add(rank, request_of("new"), 7);
  Request member = request_of("member");
  member.group = "pair";
  member.group_size = 2;
  for (int rank = 0; rank < 3; ++rank) negotiator.add(rank, member, 8);
  CHECK(negotiator.stalls(4).empty());
  std::map<std::string, Negotiator::Stall> found;
  for (const auto& stall : negotiator.stalls(8)) found[stall.name] = stall;
  CHECK_EQ(found.size(), size_t{3});
  CHECK(found["known"].asked == std::vector<int>{2} && found["known"].missing == (std::vector<int>{0, 1}));
  CHECK_EQ(found["known"].since, 5.0);
  CHECK(found["new"].asked == (std::vector<int>{0, 2}) && found["new"].missing == std::vector<int>{1});
  CHECK(found["pair"].missing.empty());

  Request join = request_of("join", Kind::Join, {});
  join.cacheable = false;
  negotiator.add(1, join, 9);  // completes "new", which this rank had not requested
  for (const auto& stall : negotiator.stalls(10))
    CHECK(stall.name == "pair" || (stall.name == "known" && stall.missing == std::vector{0}));
}

void test_a_rank_that_left() {
  Negotiator negotiator({.size = 3});
  for (int rank = 0; rank < 3; ++rank) negotiator.add(rank, request_of("w"), 0);
  const uint32_t id = buckets_of(negotiator.decide(0)).at(0).entries.at(0).id;
  const auto lost = [](const Plan& plan, const std::string& name) {
    const std::vector<Refusal> refusals = refusals_of(plan);
    return plan.size() == 1 && refusals.size() == 1 && refusals[0].name == name &&
           refusals[0].error.kind == ErrorKind::PeerLost && refusals[0].error.rank == 1 &&
           refusals[0].error.reason == "it has shut down";
  };
  // Operations that it had requested can still run; others are refused, by number or in full.
  negotiator.add(1, request_of("last"), 0);
  negotiator.add(0, request_of("last"), 0);
  negotiator.add(0, id, 0);
  CHECK(negotiator.decide(0).empty());
  RankSet gone;
  gone.add(1);
  negotiator.leave(gone, 1, "it has shut down");
  CHECK(lost(negotiator.decide(0), "w"));
  negotiator.add(2, request_of("last"), 0);
  CHECK_EQ(buckets_of(negotiator.decide(0)).size(), 1U);

  // Later requests get the same error.
  for (const int rank : {0, 2}) {
    negotiator.add(rank, id, 1);
    CHECK(lost(negotiator.decide(1), "w"));
    negotiator.add(rank, request_of("new"), 1);
    CHECK(lost(negotiator.decide(1), "new"));
  }
  CHECK_EQ(negotiator.waiting(), 0U);
}

void test_what_no_rank_may_ask() {
  Negotiator negotiator({.size = 2});
  negotiator.add(0, request_of("w"), 0);
  CHECK(CHECK_THROWS(Error, negotiator.add(0, request_of("w"), 0)).kind == ErrorKind::Internal);
  CHECK(CHECK_THROWS(Error, negotiator.add(1, 0U, 0)).kind == ErrorKind::Internal);
  CHECK(CHECK_THROWS(Error, negotiator.add(1, kNoId, 0)).kind == ErrorKind::Internal);
  negotiator.add(1, request_of("w"), 0);
  const uint32_t id = buckets_of(negotiator.decide(0)).at(0).entries.at(0).id;
  negotiator.add(0, id, 0);
  CHECK(CHECK_THROWS(Error, negotiator.add(0, id, 0)).kind == ErrorKind::Internal);

  const auto refused = [](Request request) {
    Negotiator fresh({.size = 2});
    return CHECK_THROWS(Error, fresh.add(1, request, 0)).kind == ErrorKind::Invalid;
  };
  CHECK(refused(request_of("w", Kind::Allgather, {})));
  Request root = request_of("w", Kind::Broadcast);
  root.root = 2;
  CHECK(refused(root));
  Request splits = request_of("w", Kind::Alltoall, {4});
  splits.splits = {1};
  CHECK(refused(splits));
  splits.splits = {3, 2};
  CHECK(refused(splits));
  splits.splits = {-1, 1};
  CHECK(refused(splits));
}

// Ranks that submit the same operations in their own orders, step after step, some by number and some in full.
class Simulation {
 public:
  Simulation(int size, unsigned seed) : size_(size), random_(seed), negotiator_({.size = size, .cache_capacity = 6}) {}

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      std::vector<Request> wanted;
      for (int i = 0; i < 8; ++i) {
        // One of the shapes changes sometimes, and one name is new in every step.
        Request request = request_of("t" + std::to_string(i), Kind::Allreduce, {i == 3 ? step / 5 % 2 + 1 : i});
        if (i == 6) request.name += "." + std::to_string(step);
        if (i >= 4 && i < 6) request.group = "g", request.group_size = 2;
        wanted.push_back(request);
      }
      this->step(wanted);
    }
  }

 private:
  void step(const std::vector<Request>& wanted) {
    std::vector<std::pair<int, Request>> arrivals;
    for (int rank = 0; rank < size_; ++rank)
      for (const Request& request : wanted) arrivals.emplace_back(rank, request);
    std::shuffle(arrivals.begin(), arrivals.end(), random_);
    std::map<std::string, int> asked;
    std::set<std::string> done;
    for (const auto& [rank, request] : arrivals) {
      const auto known = numbers_.find(request.name);
      if (known != numbers_.end() && signatures_.at(known->second) == request) negotiator_.add(rank, known->second, 0);
      else negotiator_.add(rank, request, 0);
      ++asked[request.name];
      if (random_() % 3 != 0) continue;
      absorb(negotiator_.decide(0), wanted, asked, done);
    }
    absorb(negotiator_.decide(0), wanted, asked, done);
    CHECK_EQ(done.size(), wanted.size());
    CHECK_EQ(negotiator_.waiting(), 0U);
  }

  void absorb(const Plan& plan, const std::vector<Request>& wanted, const std::map<std::string, int>& asked,
              std::set<std::string>& done) {
    CHECK(refusals_of(plan).empty());
    for (const Bucket& bucket : buckets_of(plan)) {
      for (const Entry& entry : bucket.entries) {
        const std::string name = entry.name.empty() ? signatures_.at(entry.id).name : entry.name;
        CHECK_EQ(asked.at(name), size_);
        check::that(done.insert(name).second, "runs once", name);
        if (entry.name.empty() || entry.id == kNoId) continue;
        numbers_[name] = entry.id;
        const auto named = [&](const Request& request) { return request.name == name; };
        signatures_[entry.id] = *std::find_if(wanted.begin(), wanted.end(), named);
      }
    }
  }

  int size_;
  std::mt19937 random_;
  Negotiator negotiator_;
  std::map<std::string, uint32_t> numbers_;
  std::map<uint32_t, Request> signatures_;
};

}  // namespace

int main() {
  test_order_of_arrival_changes_nothing();
  test_each_disagreement_is_named();
  test_ragged_sizes_reach_the_plan();
  test_numbers();
  test_inputs_of_all_ranks_are_reduced();
  test_full_cache_still_works();
  test_groups_run_whole();
  test_timeouts_name_the_missing();
  test_stalls_name_who_asked_and_who_did_not();
  test_a_rank_that_left();
  test_what_no_rank_may_ask();
  for (const int size : {1, 2, 3, 4, 7, 33})
    for (unsigned seed = 0; seed < 5; ++seed) Simulation(size, seed).run(20);
  return check::report();
}
