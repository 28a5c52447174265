// The collectors of a tree tell the coordinator what it would have heard of each rank itself: simulated with any tree
// and any order in which messages travel, without threads, sockets or clocks.
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

// Every rank's parent is any rank before it, or the one right before it: bushy trees and chains.
std::vector<int> random_tree(int size, std::mt19937& random) {
  std::vector<int> parents{-1};
  const bool chain = random() % 4 == 0;
  for (int rank = 1; rank < size; ++rank)
    parents.push_back(chain ? rank - 1 : static_cast<int>(random() % static_cast<unsigned>(rank)));
  return parents;
}

struct Ask {
  int rank;
  Request request;
};

// What all ranks ask for in one step, in any order; now and then one asks for something else, or not at all.
std::vector<Ask> random_step(int size, int step, std::mt19937& random) {
  std::vector<Ask> asks;
  for (int tensor = 0; tensor < 6; ++tensor) {
    std::string name = "t" + std::to_string(tensor);
    if (tensor == 5) name += "." + std::to_string(step);
    const int64_t rows = tensor == 4 ? 1 + step / 3 : 4;
    const auto fate = random() % 8;
    const auto odd = static_cast<int>(random() % static_cast<unsigned>(size));
    for (int rank = 0; rank < size; ++rank) {
      if (fate == 0 && rank == odd) continue;
      asks.push_back({rank, request_of(name, fate == 1 && rank == odd ? rows + 9 : rows)});
    }
  }
  std::shuffle(asks.begin(), asks.end(), random);
  return asks;
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

void test_the_coordinator_decides_as_if_it_had_heard_everybody() {
  for (unsigned seed = 0; seed < 150; ++seed) {
    std::mt19937 random(seed);
    const int size = 2 + static_cast<int>(random() % 12);
    Ranks ranks(random_tree(size, random), seed);
    Negotiator reference(Ranks::options(static_cast<size_t>(size)));
    for (int step = 0; step < 8; ++step) {
      // A step that lacks somebody ends by its timeout.
      const double begin = 100.0 * step;
      ranks.now = begin;
      for (const Ask& ask : random_step(size, step, random)) {
        ranks.ask(ask.rank, ask.request);
        reference.ask(ask.rank, ask.request, begin);
        for (auto moves = random() % 4; moves > 0; --moves) ranks.move();
        ranks.now += random() % 50 == 0 ? 0.6 : 0.001;
      }
      Outcomes expected = outcomes_of(reference, begin);
      expected.merge(outcomes_of(reference, begin + 50));
      ranks.settle();
      ranks.now += 2;  // beyond the collectors' patience
      ranks.settle();
      ranks.now = begin + 60;
      ranks.settle();
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
    const int leaver = size - 1;  // nobody is below it
    const auto step = [&](const std::vector<std::string>& names, bool all) {
      for (const std::string& name : names)
        for (int rank = 0; rank < size; ++rank)
          if (all || rank != leaver) ranks.ask(rank, request_of(name));
    };
    step({"a", "b"}, true);
    ranks.settle();
    ranks.take_outcomes();
    // By number and new, before its farewell and after; what it had asked for can still run.
    ranks.ask(leaver, request_of("a"));
    step({"a"}, false);
    for (int rank = 1; rank < leaver; ++rank) ranks.ask(rank, request_of("b"));
    for (auto moves = random() % 40; moves > 0; --moves) ranks.move();
    ranks.leave(leaver);
    for (auto moves = random() % 40; moves > 0; --moves) ranks.move();
    ranks.settle();
    Outcomes got = ranks.take_outcomes();
    CHECK_EQ(got["a"], "runs");
    const std::string lost = "PeerLost  " + std::to_string(leaver);
    if (size > 2) CHECK_EQ(got["b"].substr(0, lost.size()), lost);
    ranks.ask(1, request_of("a"));
    ranks.settle();
    CHECK_EQ(ranks.take_outcomes()["a"], lost);
  }
}

void test_a_late_ask_counts_as_a_new_one() {
  // Rank 3 asks below rank 1 while the refusal that names it is on its way down.
  Ranks ranks({-1, 0, 1, 1}, 7);
  const auto all_ask = [&] {
    for (int rank = 0; rank < 4; ++rank) ranks.ask(rank, request_of("w"));
  };
  all_ask();
  ranks.settle();
  CHECK_EQ(ranks.take_outcomes()["w"], "runs");
  for (int rank = 0; rank < 3; ++rank) ranks.ask(rank, request_of("w"));
  ranks.now = 5;
  ranks.settle();  // beyond the collectors' patience: the coordinator knows who has asked
  ranks.now = 20;
  ranks.ask(3, request_of("w"));
  ranks.move();
  ranks.settle();
  const std::string outcome = ranks.take_outcomes()["w"];
  if (outcome != "runs") {
    CHECK_EQ(outcome, "Timeout  3");
    CHECK(ranks.waits_for(3, "w"));
    for (int rank = 0; rank < 3; ++rank) ranks.ask(rank, request_of("w"));
    ranks.now = 25;
    ranks.settle();
    CHECK_EQ(ranks.take_outcomes()["w"], "runs");
  }
  CHECK_EQ(ranks.waiting(), 0U);
}

void test_a_repeated_step_takes_one_message_of_each_rank() {
  Ranks ranks({-1, 0, 0, 1, 1, 3}, 1);
  for (int step = 0; step < 3; ++step) {
    const size_t before = ranks.messages_up();
    for (int rank = 5; rank >= 0; --rank)
      for (const char* name : {"a", "b", "c"}) ranks.ask(rank, request_of(name));
    ranks.settle();
    for (const auto& [name, outcome] : ranks.take_outcomes()) check::equal(outcome, "runs", name);
    // Whoever submits slowly sends more: one message for each request at most.
    if (step > 0) CHECK(ranks.messages_up() - before <= 3 * 5);
  }
  // In one message each when they are asked for at once, and that is nothing but a range.
  Collector leaf(2, {}, kPatience);
  leaf.heed({Bucket{Kind::Allreduce, {{"a", 0, {}}, {"b", 1, {}}, {"c", 2, {}}}}});
  leaf.ask(Asking{2U, 0U, 1U}, 0);
  CHECK(leaf.drain(0) == (Gathered{Numbers{kSender, true, 0, 3}}));
  CHECK(leaf.idle());
}

void test_asks_are_held_until_all_have_asked() {
  Collector inner(1, {4, 9}, kPatience);
  inner.heed({Bucket{Kind::Allreduce, {{"a", 0, {}}, {"b", 1, {}}}}});
  const Gathered both{Numbers{kSender, true, 0, 2}};
  inner.ask(4, both, 0);
  inner.ask(Asking{0U, 1U}, 0);
  CHECK(inner.drain(0.5).empty() && !inner.idle());
  inner.ask(9, {Numbers{kSender, true, 1, 1}}, 0.6);
  CHECK(inner.drain(0.6) == (Gathered{Numbers{kSender, true, 1, 1}}));
  // Late: everybody by name, and whoever comes after as well, until it is settled.
  CHECK(inner.drain(1.1) == (Gathered{Numbers{1, false, 0, 1}, Numbers{4, true, 0, 1}}));
  inner.ask(9, {Numbers{kSender, true, 0, 1}}, 2);
  CHECK(inner.drain(2) == (Gathered{Numbers{9, true, 0, 1}}));
  inner.heed({Bucket{Kind::Allreduce, {{{}, 0, {}, 2}}}});
  inner.ask(9, {Numbers{kSender, true, 0, 1}}, 3);
  CHECK(inner.drain(3).empty());
  // Spelled out by a rank below: what was held goes first.
  inner.ask(4, {Spelled{4, request_of("a", 9)}}, 3);
  CHECK(inner.drain(3) == (Gathered{Numbers{9, true, 0, 1}, Spelled{4, request_of("a", 9)}}));
}

void test_what_cannot_be() {
  Collector inner(1, {4}, kPatience);
  CHECK(CHECK_THROWS(Error, inner.ask(Asking{0U}, 0)).kind == ErrorKind::Internal);
  inner.heed({Bucket{Kind::Allreduce, {{"a", 0, {}}}}});
  inner.ask(Asking{0U}, 0);
  CHECK(CHECK_THROWS(Error, inner.ask(Asking{0U}, 0)).kind == ErrorKind::Internal);
  for (const Numbers& absurd : {Numbers{kSender, true, 0, 2}, Numbers{4, true, 1, 1}, Numbers{4, false, 0, 1u << 31}})
    CHECK(CHECK_THROWS(Error, inner.ask(4, {absurd}, 0)).kind == ErrorKind::Internal);
  CHECK(CHECK_THROWS(Error, inner.heed({Bucket{Kind::Allreduce, {{{}, 0, {}, 2}}}})).kind == ErrorKind::Internal);
  // Nobody speaks for a rank that is not below it.
  Tree tree({-1, 0, 0, 1});
  Negotiator negotiator({.size = 4});
  CHECK(CHECK_THROWS(Error, hand_over({Spelled{3, request_of("a")}}, 2, tree, negotiator, 0)).kind ==
        ErrorKind::Internal);
}

}  // namespace

int main() {
  test_the_coordinator_decides_as_if_it_had_heard_everybody();
  test_who_leaves_is_named();
  test_a_late_ask_counts_as_a_new_one();
  test_a_repeated_step_takes_one_message_of_each_rank();
  test_asks_are_held_until_all_have_asked();
  test_what_cannot_be();
  return check::report();
}
