// The pending operations of a rank; and ranks with a negotiator, simulated without an engine.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "engine/carried.h"
#include "engine/negotiator.h"
#include "engine/pending.h"

using namespace farandole;

namespace {

OperationPtr operation_of(const std::string& name, int64_t elements = 4, uint64_t submitted_ns = 0) {
  auto operation = std::make_shared<Operation>();
  operation->request.name = name;
  operation->request.kind = Kind::Allreduce;
  operation->request.dtype = DType::Float32;
  operation->request.shape = {elements};
  operation->request.cacheable = true;
  operation->submitted_ns = submitted_ns;
  return operation;
}

void add(Pending& pending, const OperationPtr& operation) { pending.add({&operation, 1}); }

uint32_t number_of(Pending& pending, const OperationPtr& operation) {
  Recurring recurring;
  recurring.operations = {operation};
  recurring.arrange();
  return pending.number_of(recurring);
}

void test_a_number_stands_for_a_signature() {
  Pending pending;
  const OperationPtr first = operation_of("w");
  CHECK_EQ(number_of(pending, first), kNoId);
  add(pending, first);
  CHECK(pending.has_new());
  CHECK(pending.drain() == (RequestBatch{first->request}));
  CHECK(pending.drain().empty());
  CHECK(pending.take(Entry{"w", 5, {}}) == first);

  const OperationPtr again = operation_of("w");
  CHECK_EQ(number_of(pending, again), 5U);
  add(pending, again);
  CHECK(pending.drain() == (RequestBatch{5U}));
  CHECK(pending.take(Entry{"", 5, {}}) == again);

  const OperationPtr other = operation_of("w", 9);
  CHECK_EQ(number_of(pending, other), kNoId);
  add(pending, other);
  CHECK(pending.drain() == (RequestBatch{other->request}));
  CHECK(pending.take(Entry{"w", kNoId, {}}) == other);  // no number for the new signature: the old one keeps its number

  add(pending, operation_of("w"));
  CHECK(pending.drain() == (RequestBatch{5U}));
}

void test_few_small_inputs_are_carried() {
  const std::vector<float> values{1, 2, 3, 4};
  const auto* input = reinterpret_cast<const std::byte*>(values.data());
  Pending pending;
  const auto ask = [&](std::vector<std::pair<const char*, int64_t>> wanted, bool carries) {
    std::vector<OperationPtr> operations;
    for (const auto& [name, elements] : wanted) {
      operations.push_back(operation_of(name, elements));
      operations.back()->input = input;
    }
    pending.add(operations);
    return pending.drain(carries);
  };
  const auto take = [&](std::initializer_list<Entry> entries) {
    for (const Entry& entry : entries) CHECK(pending.take(entry) != nullptr);
  };
  CHECK(std::holds_alternative<Request>(ask({{"small", 4}}, true)[0]));  // no number yet
  static_cast<void>(ask({{"large", kCarriedBytes / 4}}, true));
  take({{"small", 0, {}}, {"large", 1, {}}});
  const NumberWithInput small{0, Bytes(input, input + 16)};
  CHECK(ask({{"small", 4}}, true) == (RequestBatch{small}));
  take({{"", 0, {}}});
  CHECK(ask({{"small", 4}}, false) == (RequestBatch{0U}));
  take({{"", 0, {}}});
  // Too much for one message.
  CHECK(ask({{"small", 4}, {"large", kCarriedBytes / 4}}, true) == (RequestBatch{0U, 1U}));
  take({{"", 0, {}}, {"", 1, {}}});
  // Not a plain reduction.
  const OperationPtr adasum = operation_of("adasum");
  adasum->request.op = ReduceOp::Adasum;
  for (int turn = 0; turn < 2; ++turn) {
    add(pending, adasum);
    const RequestBatch batch = pending.drain(true);
    CHECK(turn == 0 || batch == (RequestBatch{2U}));
    take({{"adasum", 2, {}}});
  }
}

// One new signature makes all members of a group new.
void test_a_group_has_the_number_of_its_first() {
  Pending pending;
  Recurring group;
  for (const char* name : {"a", "b"}) group.operations.push_back(operation_of(name));
  group.arrange();
  pending.add(group.operations);
  CHECK_EQ(pending.drain().size(), 2U);
  CHECK(pending.take(Entry{"b", 3, {}}) == group.operations[1]);
  CHECK_EQ(pending.number_of(group), kNoId);
  CHECK(pending.take(Entry{"a", 4, {}}) == group.operations[0]);
  CHECK_EQ(pending.number_of(group), 4U);
  group.operations[1] = operation_of("b", 9);
  group.arrange();
  CHECK_EQ(pending.number_of(group), kNoId);
}

// Members of one type are adjacent, in their given order.
void test_arrangement() {
  Recurring group;
  for (const char* name : {"a", "b", "c", "d"}) group.operations.push_back(operation_of(name));
  group.operations[1]->request.dtype = DType::Float64;
  group.operations[3]->request.dtype = DType::Float64;
  group.arrange();
  std::string order;
  for (const OperationPtr& each : group.operations) order += each->request.name;
  CHECK(order == "acbd" || order == "bdac");
  CHECK(group.buckets == (std::vector<size_t>{2, 4}));
  CHECK_EQ(group.bytes, size_t{2 * 16 + 2 * 32});
}

void test_what_cannot_be_taken() {
  Pending pending;
  for (const Entry& entry : {Entry{"w", kNoId, {}}, Entry{"", 0, {}}, Entry{"", kNoId, {}}})
    CHECK(CHECK_THROWS(Error, pending.take(entry)).kind == ErrorKind::Internal);
  CHECK(pending.take(std::string("w")) == nullptr);
  add(pending, operation_of("w"));
  CHECK(CHECK_THROWS(Error, add(pending, operation_of("w"))).kind == ErrorKind::Invalid);
  const std::vector<OperationPtr> group = {operation_of("a"), operation_of("b"), operation_of("w")};
  CHECK(CHECK_THROWS(Error, pending.add(group)).name == "w");
  CHECK(pending.take(std::string("a")) == nullptr);  // all or none
  CHECK_EQ(pending.drain().size(), 1U);
  CHECK(pending.take(std::string("w")) != nullptr);
  CHECK(pending.take(std::string("w")) == nullptr);
  add(pending, operation_of("w"));
}

void test_after_a_failure() {
  Pending pending;
  add(pending, operation_of("a"));
  add(pending, operation_of("b"));
  CHECK(!pending.empty());
  CHECK(pending.refuse(Error::peer_lost("", 3, "its process was killed or crashed")));
  CHECK(!pending.refuse(Error::closed("it was shut down")));
  const Error refused = CHECK_THROWS(Error, add(pending, operation_of("c")));
  CHECK(refused.kind == ErrorKind::PeerLost && refused.rank == 3 && refused.name == "c");
  CHECK_EQ(pending.take_all().size(), 2U);
  CHECK(pending.drain().empty());
  CHECK(pending.empty());
}

void test_overdue_is_the_oldest() {
  Pending pending;
  add(pending, operation_of("young", 4, 300));
  add(pending, operation_of("old", 4, 100));
  add(pending, operation_of("older than most", 4, 200));
  CHECK(pending.overdue(100) == nullptr);
  CHECK_EQ(pending.overdue(1000)->request.name, "old");
}

// One rank: makes requests in its own order, and runs the plans.
struct Rank {
  Pending pending;
  std::vector<OperationPtr> wanted;
  std::vector<std::string> ran;
};

class Simulation {
 public:
  Simulation(int size, unsigned seed, size_t cache)
      : random_(seed), negotiator_({.size = size, .fusion_threshold = 64, .cache_capacity = cache}) {
    for (int rank = 0; rank < size; ++rank) ranks_.push_back(std::make_unique<Rank>());
  }

  void run(int steps) {
    for (int number = 0; number < steps; ++number) {
      want(number);
      // One rank at a time submits one operation, or sends its requests; plans may arrive in between.
      while (std::ranges::any_of(ranks_, [](const auto& rank) { return !rank->wanted.empty(); })) act();
      for (size_t rank = 0; rank < ranks_.size(); ++rank) tell(rank);
      decide();
      for (const auto& rank : ranks_) {
        CHECK(rank->pending.empty());
        CHECK_EQ(rank->ran.size(), 6U);
        check::that(rank->ran == ranks_[0]->ran, "all ranks ran the same in the same order");
      }
      for (const auto& rank : ranks_) rank->ran.clear();
      CHECK_EQ(negotiator_.waiting(), 0U);
    }
  }

 private:
  void want(int number) {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (int i = 0; i < 6; ++i) {
        // 0 to 2 recur; 3 alternates between shapes; 4 is new in every step; 5 sometimes differs between ranks.
        const bool odd_one_out = i == 5 && number % 4 == 3 && rank == 0;
        const int64_t elements = odd_one_out ? 7 : i == 3 ? number / 2 % 2 + 1 : i + 1;
        const std::string name = "t" + std::to_string(i) + (i == 4 ? "." + std::to_string(number) : "");
        ranks_[rank]->wanted.push_back(operation_of(name, elements));
      }
      std::ranges::shuffle(ranks_[rank]->wanted, random_);
    }
  }

  void act() {
    const size_t index = random_() % ranks_.size();
    Rank& rank = *ranks_[index];
    if (random_() % 3 == 0) tell(index);
    if (random_() % 4 == 0) decide();
    if (rank.wanted.empty()) return;
    add(rank.pending, rank.wanted.back());
    rank.wanted.pop_back();
  }

  void tell(size_t rank) {
    for (auto& item : ranks_[rank]->pending.drain()) {
      if (const auto* id = std::get_if<uint32_t>(&item)) negotiator_.add(static_cast<int>(rank), *id, 0);
      else negotiator_.add(static_cast<int>(rank), std::get<Request>(item), 0);
    }
  }

  void decide() {
    const Plan plan = negotiator_.decide(0);
    for (const auto& rank : ranks_) {
      for (const auto& item : plan) {
        if (const auto* refusal = std::get_if<Refusal>(&item)) {
          CHECK(refusal->name == "t5" && refusal->error.what_differs == "shape");
          finish(*rank, rank->pending.take(refusal->name));
          continue;
        }
        for (const Entry& entry : std::get<Bucket>(item).entries) finish(*rank, rank->pending.take(entry));
      }
    }
  }

  void finish(Rank& rank, const OperationPtr& operation) {
    CHECK(operation != nullptr);
    rank.ran.push_back(operation->request.name);
  }

  std::mt19937 random_;
  Negotiator negotiator_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace

int main() {
  test_a_number_stands_for_a_signature();
  test_few_small_inputs_are_carried();
  test_a_group_has_the_number_of_its_first();
  test_arrangement();
  test_what_cannot_be_taken();
  test_after_a_failure();
  test_overdue_is_the_oldest();
  for (const int size : {1, 2, 3, 5})
    for (unsigned seed = 0; seed < 5; ++seed)
      for (const size_t cache : {size_t{0}, size_t{4}, size_t{1000}}) Simulation(size, seed, cache).run(24);
  return check::report();
}
