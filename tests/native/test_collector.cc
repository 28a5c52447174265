// Collectors send the coordinator the same requests as all ranks would: simulated with random trees and orders of
// messages, without threads, sockets or clocks.
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "collector_ranks.h"

using namespace collectors;

namespace {

// Every rank's parent is any rank before it, or the previous one: bushy trees and chains.
std::vector<int> random_tree(int size, std::mt19937& random) {
  std::vector<int> parents{-1};
  const bool chain = random() % 4 == 0;
  for (int rank = 1; rank < size; ++rank)
    parents.push_back(chain ? rank - 1 : static_cast<int>(random() % static_cast<unsigned>(rank)));
  return parents;
}

struct Submission {
  int rank;
  Request request;
};

// The requests of all ranks in one step, in random order; sometimes one differs or is missing.
std::vector<Submission> random_step(int size, int step, std::mt19937& random) {
  std::vector<Submission> submissions;
  for (int tensor = 0; tensor < 6; ++tensor) {
    std::string name = "t" + std::to_string(tensor);
    if (tensor == 5) name += "." + std::to_string(step);
    const int64_t rows = tensor == 4 ? 1 + step / 3 : 4;
    const auto fate = random() % 8;
    const auto odd = static_cast<int>(random() % static_cast<unsigned>(size));
    for (int rank = 0; rank < size; ++rank) {
      if (fate == 0 && rank == odd) continue;
      submissions.push_back({rank, request_of(name, fate == 1 && rank == odd ? rows + 9 : rows)});
    }
  }
  std::shuffle(submissions.begin(), submissions.end(), random);
  return submissions;
}

Outcomes outcomes_of(Negotiator& negotiator, double now) {
  Outcomes outcomes;
  for (const auto& item : negotiator.decide(now)) {
    if (const auto* refusal = std::get_if<Refusal>(&item)) outcomes[refusal->name] += text_of(refusal->error);
    else
      for (const Entry& entry : std::get<Bucket>(item).entries) outcomes[entry.name] += "runs";
  }
  return outcomes;
}

void test_the_coordinator_decides_as_without_collectors() {
  for (unsigned seed = 0; seed < 150; ++seed) {
    std::mt19937 random(seed);
    const int size = 2 + static_cast<int>(random() % 12);
    Ranks ranks(random_tree(size, random), seed);
    ranks.may_carry = seed % 3 != 0;
    Negotiator reference(Ranks::options(static_cast<size_t>(size)));
    for (int step = 0; step < 8; ++step) {
      // A step with a missing rank ends by its timeout.
      const double begin = 100.0 * step;
      ranks.now = begin;
      for (const Submission& submission : random_step(size, step, random)) {
        ranks.submit(submission.rank, submission.request);
        reference.add(submission.rank, submission.request, begin);
        for (auto moves = random() % 4; moves > 0; --moves) ranks.move();
        ranks.now += random() % 50 == 0 ? 0.6 : 0.001;
      }
      Outcomes expected = outcomes_of(reference, begin);
      expected.merge(outcomes_of(reference, begin + 50));
      ranks.exchange_messages();
      ranks.now += 2;  // longer than the collectors' merge wait
      ranks.exchange_messages();
      ranks.now = begin + 60;
      ranks.exchange_messages();
      const Outcomes got = ranks.take_outcomes();
      for (const auto& [name, text] : expected)
        check::equal(got.contains(name) ? got.at(name) : "nothing", text, name + ", seed " + std::to_string(seed));
      CHECK_EQ(got.size(), expected.size());
      CHECK_EQ(ranks.waiting(), 0U);
    }
  }
}

void test_who_leaves_is_named() {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const int size = 3 + static_cast<int>(random() % 10);
    Ranks ranks(random_tree(size, random), seed);
    ranks.may_carry = seed % 3 != 0;
    const int leaver = size - 1;  // the leaver has no ranks below it
    const auto step = [&](const std::vector<std::string>& names, bool all) {
      for (const std::string& name : names)
        for (int rank = 0; rank < size; ++rank)
          if (all || rank != leaver) ranks.submit(rank, request_of(name));
    };
    step({"a", "b"}, true);
    ranks.exchange_messages();
    ranks.take_outcomes();
    // By number and in full, before the departure and after; operations that it had requested can still run.
    ranks.submit(leaver, request_of("a"));
    step({"a"}, false);
    for (int rank = 1; rank < leaver; ++rank) ranks.submit(rank, request_of("b"));
    for (auto moves = random() % 40; moves > 0; --moves) ranks.move();
    ranks.leave(leaver);
    for (auto moves = random() % 40; moves > 0; --moves) ranks.move();
    ranks.exchange_messages();
    Outcomes got = ranks.take_outcomes();
    CHECK_EQ(got["a"], "runs");
    const std::string lost = "PeerLost  " + std::to_string(leaver);
    if (size > 2) CHECK_EQ(got["b"].substr(0, lost.size()), lost);
    ranks.submit(1, request_of("a"));
    ranks.exchange_messages();
    CHECK_EQ(ranks.take_outcomes()["a"], lost);
  }
}

void test_a_late_ask_counts_as_a_new_one() {
  // Rank 3, below rank 1, makes its request while the refusal that names it is on its way down.
  Ranks ranks({-1, 0, 1, 1}, 7);
  const auto all_ask = [&] {
    for (int rank = 0; rank < 4; ++rank) ranks.submit(rank, request_of("w"));
  };
  all_ask();
  ranks.exchange_messages();
  CHECK_EQ(ranks.take_outcomes()["w"], "runs");
  for (int rank = 0; rank < 3; ++rank) ranks.submit(rank, request_of("w"));
  ranks.now = 5;
  ranks.exchange_messages();  // longer than the collectors' merge wait: the coordinator knows the ranks that made the
                              // request
  ranks.now = 20;
  ranks.submit(3, request_of("w"));
  ranks.move();
  ranks.exchange_messages();
  const std::string outcome = ranks.take_outcomes()["w"];
  if (outcome != "runs") {
    CHECK_EQ(outcome, "Timeout  3");
    CHECK(ranks.waits_for(3, "w"));
    for (int rank = 0; rank < 3; ++rank) ranks.submit(rank, request_of("w"));
    ranks.now = 25;
    ranks.exchange_messages();
    CHECK_EQ(ranks.take_outcomes()["w"], "runs");
  }
  CHECK_EQ(ranks.waiting(), 0U);
}

void test_a_repeated_step_takes_one_message_of_each_rank() {
  Ranks ranks({-1, 0, 0, 1, 1, 3}, 1);
  for (int step = 0; step < 3; ++step) {
    const size_t before = ranks.messages_up();
    for (int rank = 5; rank >= 0; --rank)
      for (const char* name : {"a", "b", "c"}) ranks.submit(rank, request_of(name));
    ranks.exchange_messages();
    for (const auto& [name, outcome] : ranks.take_outcomes()) check::equal(outcome, "runs", name);
    // A slow rank sends more: at most one message per request.
    if (step > 0) CHECK(ranks.messages_up() - before <= 3 * 5);
  }
  // Requests made together are one message, which holds only a range.
  Collector leaf(2, {}, kMergeWait);
  leaf.learn({Bucket{Kind::Allreduce, {{"a", 0, {}}, {"b", 1, {}}, {"c", 2, {}}}}});
  leaf.add(RequestBatch{2U, 0U, 1U}, 0);
  CHECK(leaf.drain(0) == (CollectedRequests{NumberRange{kSender, true, 0, 3}}));
  CHECK(leaf.idle());
}

void test_requests_are_held_until_all_ranks_have_made_them() {
  Collector inner(1, {4, 9}, kMergeWait);
  inner.learn({Bucket{Kind::Allreduce, {{"a", 0, {}}, {"b", 1, {}}}}});
  const CollectedRequests both{NumberRange{kSender, true, 0, 2}};
  inner.add(4, both, 0);
  inner.add(RequestBatch{0U, 1U}, 0);
  CHECK(inner.drain(0.5).empty() && !inner.idle());
  inner.add(9, {NumberRange{kSender, true, 1, 1}}, 0.6);
  CHECK(inner.drain(0.6) == (CollectedRequests{NumberRange{kSender, true, 1, 1}}));
  // When members are late, requests go up with their ranks, also later ones, until a plan resolves them.
  CHECK(inner.drain(1.1) == (CollectedRequests{NumberRange{1, false, 0, 1}, NumberRange{4, true, 0, 1}}));
  inner.add(9, {NumberRange{kSender, true, 0, 1}}, 2);
  CHECK(inner.drain(2) == (CollectedRequests{NumberRange{9, true, 0, 1}}));
  inner.learn({Bucket{Kind::Allreduce, {{{}, 0, {}, 2}}}});
  inner.add(9, {NumberRange{kSender, true, 0, 1}}, 3);
  CHECK(inner.drain(3).empty());
  // A rank below sends the request in full, so held requests go up first.
  inner.add(4, {FullRequest{4, request_of("a", 9)}}, 3);
  CHECK(inner.drain(3) == (CollectedRequests{NumberRange{9, true, 0, 1}, FullRequest{4, request_of("a", 9)}}));
}

void test_what_cannot_be() {
  Collector inner(1, {4}, kMergeWait);
  CHECK(CHECK_THROWS(Error, inner.add(RequestBatch{0U}, 0)).kind == ErrorKind::Internal);
  inner.learn({Bucket{Kind::Allreduce, {{"a", 0, {}}}}});
  inner.add(RequestBatch{0U}, 0);
  CHECK(CHECK_THROWS(Error, inner.add(RequestBatch{0U}, 0)).kind == ErrorKind::Internal);
  for (const NumberRange& absurd :
       {NumberRange{kSender, true, 0, 2}, NumberRange{4, true, 1, 1}, NumberRange{4, false, 0, 1u << 31}})
    CHECK(CHECK_THROWS(Error, inner.add(4, {absurd}, 0)).kind == ErrorKind::Internal);
  CHECK(CHECK_THROWS(Error, inner.learn({Bucket{Kind::Allreduce, {{{}, 0, {}, 2}}}})).kind == ErrorKind::Internal);
  // A rank cannot send requests for ranks that are not below it.
  Tree tree({-1, 0, 0, 1});
  Negotiator negotiator({.size = 4});
  CHECK(CHECK_THROWS(Error, deliver({FullRequest{3, request_of("a")}}, 2, tree, negotiator, 0)).kind ==
        ErrorKind::Internal);
}

}  // namespace

int main() {
  test_the_coordinator_decides_as_without_collectors();
  test_who_leaves_is_named();
  test_a_late_ask_counts_as_a_new_one();
  test_a_repeated_step_takes_one_message_of_each_rank();
  test_requests_are_held_until_all_ranks_have_made_them();
  test_what_cannot_be();
  return check::report();
}
