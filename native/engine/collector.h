#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/negotiator.h"
#include "engine/pending.h"
#include "engine/plan.h"
#include "engine/rank_set.h"
#include "engine/tree.h"
#include "engine/wire.h"

namespace farandole {

/// Merges what the ranks of a subtree ask for by number: one word goes up for all of them once all have asked. Pure,
/// without clocks, threads or sockets. Lives at every rank but the coordinator.
///
/// Every ask goes up exactly once. It is held back only while it may still become part of the one word for all; it goes
/// up by itself, naming its rank, when that has become unlikely: a rank below spells the same name out or passed its
/// ask up by itself, a rank has left, one below has joined, or the others are late (the coordinator names who is
/// missing).
class Collector {
 public:
  /// `patience` is how long, in seconds, an ask is held back at most.
  Collector(int rank, const std::vector<int>& children, double patience);

  /// This rank asks at time `now` (seconds, any epoch). Throws Error (Internal) for an unknown number, or when it asks
  /// twice.
  void ask(const Asking& asking, double now);

  /// The same for what has come from a child.
  void ask(int child, Gathered gathered, double now);

  /// A rank has left for good. Nothing can be complete any more, here or elsewhere: all is passed on at once.
  void leave();

  /// What the coordinator has decided passes by on its way down: the names of numbers, and what is settled.
  void heed(const Plan& plan);

  /// What goes up now.
  [[nodiscard]] Gathered drain(double now);

  /// Has drain() nothing to give, now and however late it is?
  [[nodiscard]] bool idle() const { return complete_.empty() && up_.empty() && held_count_ == 0; }

 private:
  struct Number {
    RankSet asked;  // places in members_
    double since = 0;
    bool apart = false;  // until it is settled, asks for it go up one by one
  };

  void ask(size_t place, uint32_t id, double now);
  void pass(const Numbers& numbers);
  void pass(Spelled spelled);
  void speak_for(size_t place, uint32_t id);
  void send_apart(uint32_t id);
  void let_go(uint32_t id);
  void let_go_of_all();
  void settle(const std::string& name);
  void learn(const Entry& entry);
  [[nodiscard]] Number& number(uint32_t id);
  void require_known(uint32_t first, uint32_t count) const;

  std::vector<int> members_;                // who asks here: this rank, then its children
  std::unordered_map<int, size_t> places_;  // child -> place in members_
  double patience_;
  std::vector<Number> numbers_;
  std::unordered_map<std::string, uint32_t> by_name_;
  std::vector<uint32_t> complete_;  // all have asked
  Gathered up_;
  size_t held_count_ = 0;    // numbers that some have asked for and others not
  double looked_ = 0;        // when late ones were last looked for
  bool incomplete_ = false;  // somebody has left
  std::string joined_;       // what those below call it that have joined; empty while nobody has
};

/// Hands the coordinator's negotiator what `sender`, a child of rank 0 in `tree`, has sent.
void hand_over(Gathered gathered, int sender, Tree& tree, Negotiator& negotiator, double now);

}  // namespace farandole
