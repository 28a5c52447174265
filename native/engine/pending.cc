#include "engine/pending.h"

#include <utility>

#include "engine/carried.h"

namespace farandole {
namespace {

bool are_few_bytes(std::span<const OperationPtr> operations) {
  size_t bytes = 0;
  for (const OperationPtr& operation : operations)
    if ((bytes += operation->request.bytes()) > kCarriedBytes) return false;
  return true;
}

}  // namespace

void Pending::add(std::span<const OperationPtr> operations) {
  const std::lock_guard lock(mu_);
  if (refused_) throw refused_->named(operations.front()->request.name);
  if (joined_)
    throw Error::invalid(operations.front()->request.name,
                         "this rank has joined; wait for join() to return before the next one");
  for (size_t i = 0; i < operations.size(); ++i) {
    Name& name = names_[operations[i]->request.name];
    if (name.pending) {
      for (const OperationPtr& taken : operations.first(i)) withdraw(taken->request.name);
      throw Error::invalid(operations[i]->request.name,
                           "an operation of the same name is still in flight; wait for it or use another name");
    }
    name.pending = operations[i];
  }
  joined_ = operations.front()->request.kind == Kind::Join;
  queue_.insert(queue_.end(), operations.begin(), operations.end());
  queued_.store(queue_.size(), std::memory_order_relaxed);
  count_.fetch_add(static_cast<int64_t>(operations.size()));
  // A thread that is about to sleep checks this again after it has registered as a sleeper, see Signal.
  has_new_.store(true, std::memory_order_seq_cst);
}

void Pending::add_transfer(const OperationPtr& transfer) {
  const std::lock_guard lock(mu_);
  if (refused_) throw refused_->named(transfer->request.name);
  transfers_.insert(transfer);
  transfer_count_.fetch_add(1);
  count_.fetch_add(1);
  has_new_.store(true, std::memory_order_seq_cst);
}

void Pending::remove_transfer(const OperationPtr& transfer) {
  const std::lock_guard lock(mu_);
  if (transfers_.erase(transfer) == 0) return;  // take_all() has returned it
  count_.fetch_sub(1);
  transfer_count_.fetch_sub(1);
}

void Pending::require_open() {
  const std::lock_guard lock(mu_);
  if (refused_) throw *refused_;
}

void Pending::withdraw(const std::string& name) {
  const auto found = names_.find(name);
  found->second.pending = nullptr;
  // Names without a number are not kept: they may be new in every step.
  if (found->second.id == kNoId) names_.erase(found);
}

uint32_t Pending::number_of(Recurring& recurring) {
  if (recurring.numbered == numberings_) return recurring.number;
  const std::lock_guard lock(mu_);
  recurring.numbered = numberings_;
  recurring.number = kNoId;
  for (const OperationPtr& operation : recurring.operations) {
    const auto found = names_.find(operation->request.name);
    if (found == names_.end() || found->second.id == kNoId || found->second.signature != operation->request)
      return kNoId;
  }
  return recurring.number = names_.at(recurring.operations.front()->request.name).id;
}

RequestBatch Pending::drain(bool carries) {
  RequestBatch batch;
  if (!has_new()) return batch;
  const std::lock_guard lock(mu_);
  has_new_.store(false, std::memory_order_relaxed);
  batch.reserve(queue_.size());
  carries = carries && are_few_bytes(queue_);
  for (const OperationPtr& operation : queue_) {
    const Request& request = operation->request;
    const Name& name = names_[request.name];
    if (name.id == kNoId || name.signature != request) batch.emplace_back(request);
    else if (!carries || !can_carry(request)) batch.emplace_back(name.id);
    else batch.emplace_back(NumberWithInput{name.id, {operation->input, operation->input + request.bytes()}});
  }
  queue_.clear();
  queued_.store(0, std::memory_order_relaxed);
  return batch;
}

OperationPtr Pending::take(const Entry& entry) {
  const std::lock_guard lock(mu_);
  Name* name = nullptr;
  if (entry.name.empty()) {
    if (entry.id < by_id_.size()) name = by_id_[entry.id];
  } else if (const auto found = names_.find(entry.name); found != names_.end()) {
    name = &found->second;
  }
  if (name == nullptr || !name->pending)
    throw Error::internal("the plan holds '" + entry.name + "' (number " + std::to_string(entry.id) +
                          "), which this rank did not request");
  OperationPtr operation = std::exchange(name->pending, nullptr);
  remove(operation);
  if (entry.id == kNoId) {
    withdraw(operation->request.name);
  } else if (name->id != entry.id) {
    // The coordinator counts its numbers up from zero.
    if (entry.id > by_id_.size() + kMostNumbers)
      throw Error::internal("the plan holds an impossible number: " + std::to_string(entry.id));
    name->id = entry.id;
    name->signature = operation->request;
    ++numberings_;
    if (by_id_.size() <= entry.id) by_id_.resize(entry.id + 1, nullptr);
    by_id_[entry.id] = name;
  }
  return operation;
}

OperationPtr Pending::take(const std::string& name) {
  const std::lock_guard lock(mu_);
  const auto found = names_.find(name);
  if (found == names_.end()) return nullptr;
  OperationPtr operation = std::exchange(found->second.pending, nullptr);
  if (operation) remove(operation);
  if (found->second.id == kNoId) names_.erase(found);
  return operation;
}

void Pending::remove(const OperationPtr& operation) {
  count_.fetch_sub(1);
  if (operation->request.kind == Kind::Join) joined_ = false;
}

bool Pending::refuse(const Error& error) {
  const std::lock_guard lock(mu_);
  if (refused_) return false;
  refused_ = error;
  return true;
}

std::vector<OperationPtr> Pending::take_all() {
  const std::lock_guard lock(mu_);
  std::vector<OperationPtr> all;
  for (auto& [name, record] : names_)
    if (record.pending) all.push_back(std::exchange(record.pending, nullptr));
  all.insert(all.end(), transfers_.begin(), transfers_.end());
  transfers_.clear();
  transfer_count_.store(0);
  queue_.clear();
  queued_.store(0, std::memory_order_relaxed);
  count_.fetch_sub(static_cast<int64_t>(all.size()));
  return all;
}

OperationPtr Pending::overdue(uint64_t before_ns) {
  const std::lock_guard lock(mu_);
  OperationPtr first;
  for (const auto& [name, record] : names_)
    if (record.pending && record.pending->request.kind != Kind::Join && record.pending->submitted_ns < before_ns &&
        (!first || record.pending->submitted_ns < first->submitted_ns))
      first = record.pending;
  return first;
}

}  // namespace farandole
