#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "engine/operation.h"
#include "engine/plan.h"
#include "engine/recurring.h"

namespace farandole {

/// What one rank asks for: numbers of signatures that are known, requests in full for the rest.
using Asking = std::vector<std::variant<uint32_t, Request>>;

/// The operations that this rank has asked for and that are not done, by name, and the numbers of names that repeat.
class Pending {
 public:
  /// Takes all or none. Throws Error: Invalid when an operation of one of these names is in flight or this rank has
  /// joined, or what refuse() was given.
  void add(std::span<const OperationPtr> operations);

  /// The number of the first operation if each has a number that stands for its very request, else kNoId. What it finds
  /// it remembers in `recurring`. To be called like take(), with nothing pending.
  [[nodiscard]] uint32_t number_of(Recurring& recurring);

  /// True when something was added since the last drain().
  [[nodiscard]] bool fresh() const { return fresh_.load(std::memory_order_seq_cst); }

  /// How many were.
  [[nodiscard]] size_t queued() const { return queued_.load(std::memory_order_relaxed); }

  /// What was added since the last call, as the coordinator wants to hear it: by number where the signature is known.
  [[nodiscard]] Asking drain();

  /// The operation that an entry of a plan means; it is pending no more, and its number is remembered.
  /// Throws Error (Internal) when this rank did not ask for it.
  [[nodiscard]] OperationPtr take(const Entry& entry);

  /// The pending operation of that name, or null.
  [[nodiscard]] OperationPtr take(const std::string& name);

  /// From now on add() throws `error`, named after the operation. Only the first call counts; returns whether it was
  /// this one.
  bool refuse(const Error& error);

  /// Throws what refuse() was given.
  void require_open();

  /// Takes all.
  [[nodiscard]] std::vector<OperationPtr> take_all();

  /// The pending operation that was submitted first, if that was before `before_ns`; a join may take as long as it
  /// does.
  [[nodiscard]] OperationPtr overdue(uint64_t before_ns);

  /// True when nothing was added that was not taken.
  [[nodiscard]] bool empty() const { return count_.load() == 0; }

 private:
  /// `operation` is pending no more.
  void let_go(const OperationPtr& operation);

  struct Name {
    uint32_t id = kNoId;
    Request signature;  // what the number stands for
    OperationPtr pending;
  };

  void withdraw(const std::string& name);  // with `mu_` held

  std::atomic<int64_t> count_{0};
  std::atomic<bool> fresh_{false};
  std::atomic<size_t> queued_{0};
  uint64_t numberings_ = 1;  // how often a name got a number; changes in take() only
  std::mutex mu_;            // guards what follows
  std::unordered_map<std::string, Name> names_;
  std::vector<Name*> by_id_;
  std::vector<OperationPtr> queue_;
  std::optional<Error> refused_;
  bool joined_ = false;  // a join is pending, and nothing can be asked for before it is done
};

}  // namespace farandole
