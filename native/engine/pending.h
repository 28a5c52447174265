#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#include "engine/operation.h"
#include "engine/plan.h"
#include "engine/recurring.h"

namespace farandole {

/// The number of a known signature, with the input of the operation; see carried.h.
struct NumberWithInput {
  uint32_t id = 0;
  Bytes input;

  bool operator==(const NumberWithInput&) const = default;
};

/// Requests of one rank: numbers of known signatures, full requests otherwise.
using RequestBatch = std::vector<std::variant<uint32_t, Request, NumberWithInput>>;

/// The operations that this rank has requested and not completed, by name, and the numbers of recurring names.
class Pending {
 public:
  /// Adds all operations or none. Throws Error: Invalid if an operation of one of these names is in flight or this rank
  /// has joined, or the error given to refuse().
  void add(std::span<const OperationPtr> operations);

  /// Adds a transfer, which is pending, but for which no request is made. Throws Error: the one given to refuse().
  void add_transfer(const OperationPtr& transfer);
  void remove_transfer(const OperationPtr& transfer);

  /// Returns the number of the first operation if each has a number for exactly its request, else kNoId. Caches the
  /// result in `recurring`. Call it like take(), with nothing pending.
  [[nodiscard]] uint32_t number_of(Recurring& recurring);

  /// Returns whether operations were added since the last drain().
  [[nodiscard]] bool has_new() const { return has_new_.load(std::memory_order_seq_cst); }

  /// The number of operations added since the last drain().
  [[nodiscard]] size_t queued() const { return queued_.load(std::memory_order_relaxed); }

  /// Returns the requests added since the last call: by number if the signature is known. With `carries`, those for
  /// small reductions contain their inputs, if they are few.
  [[nodiscard]] RequestBatch drain(bool carries = false);

  /// Removes and returns the operation of a plan's entry, and stores its number. Throws Error (Internal) if this rank
  /// did not request it.
  [[nodiscard]] OperationPtr take(const Entry& entry);

  /// Removes and returns the pending operation of that name; null if there is none.
  [[nodiscard]] OperationPtr take(const std::string& name);

  /// Makes add() throw `error`, named after the operation, from now on. Only the first call counts; returns whether it
  /// was this one.
  bool refuse(const Error& error);

  /// Throws the error given to refuse(), if any.
  void require_open();

  /// Removes and returns all pending operations.
  [[nodiscard]] std::vector<OperationPtr> take_all();

  /// Returns the oldest requested operation if it was submitted before `before_ns`. Joins do not count: they may take
  /// any time.
  [[nodiscard]] OperationPtr overdue(uint64_t before_ns);

  /// Returns whether no operation is pending.
  [[nodiscard]] bool empty() const { return count_.load() == 0; }
  [[nodiscard]] bool has_transfers() const { return transfer_count_.load() != 0; }
  [[nodiscard]] bool has_requests() const { return count_.load() != transfer_count_.load(); }

 private:
  /// Removes `operation`.
  void remove(const OperationPtr& operation);

  struct Name {
    uint32_t id = kNoId;
    Request signature;  // the request that the number stands for
    OperationPtr pending;
  };

  void withdraw(const std::string& name);  // needs mu_

  std::atomic<int64_t> count_{0};  // with transfers
  std::atomic<int64_t> transfer_count_{0};
  std::atomic<bool> has_new_{false};
  std::atomic<size_t> queued_{0};
  uint64_t numberings_ = 1;  // numbers given to names so far; changes in take() only
  std::mutex mu_;            // guards the members below
  std::unordered_map<std::string, Name> names_;
  std::vector<Name*> by_id_;
  std::vector<OperationPtr> queue_;
  std::unordered_set<OperationPtr> transfers_;
  std::optional<Error> refused_;
  bool joined_ = false;  // a join is pending; no requests until it completes
};

}  // namespace farandole
