#include <algorithm>
#include <array>
#include <cstring>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/execute.h"

// How operations that all ranks wait for at once run without the coordinator.
namespace farandole {
namespace {

/// Only what no rank can finish without all others: a rank that ran ahead could reuse a round that we still look at.
bool meets(const Recurring& recurring) {
  const Request& first = recurring.operations.front()->request;
  if (first.kind == Kind::Barrier) return true;
  return (first.kind == Kind::Allreduce || first.kind == Kind::Broadcast) && recurring.bytes > 0;
}

/// Part of a group, which can only run as a whole?
bool is_fragment(const Recurring& recurring) {
  const Request& first = recurring.operations.front()->request;
  return first.group_size != (first.group.empty() ? 0 : recurring.operations.size());
}

}  // namespace

bool Engine::run_in_lane(Recurring& recurring, const std::function<void()>& settle) {
  require_own_process(recurring.operations.front()->request.name);
  if (!lane_ || !meets(recurring) || is_fragment(recurring)) return false;
  if (turning_.load()) return false;  // the new knobs go along with a plan
  {
    const std::unique_lock driving(driver_, std::try_to_lock);
    // What is pending comes first, on every rank; so whoever is in the lane has run the same plans.
    if (!driving || failed_.load() || closed_.load() || !pending_.empty() || !plans_.empty()) return false;
    Passage passage;
    passage.number = pending_.number_of(recurring);
    if (passage.number == kNoId) return false;
    const Request& first = recurring.operations.front()->request;
    passage.instance = executed_;
    // What is no plain reduction of everybody's bytes runs as ever, only without the coordinator.
    if (recurring.bytes <= kSmallBytes && recurring.buckets.size() == 1 && first.op != ReduceOp::Adasum)
      passage.payload = recurring.bytes;
    const bool gives = first.kind != Kind::Broadcast || first.root == wiring_.rank;
    passage.load = [&recurring, gives](std::byte* to) {
      for (size_t i = 0; gives && i < recurring.operations.size(); ++i) {
        const Operation& operation = *recurring.operations[i];
        const size_t bytes = operation.request.bytes();
        std::memcpy(to, operation.input, bytes);
        to += bytes;
      }
    };
    passage.called_away = [this] { return pending_.fresh(); };
    passage.settle = settle;
    const uint64_t now = trace_.now();
    for (const OperationPtr& operation : recurring.operations) operation->submitted_ticks = now;
    if (!lane_->agree(passage)) return false;
    if (trace_.marks_plans()) trace_.add_plan(recurring.buckets.size());
    agreed_in_lane_.fetch_add(recurring.operations.size(), std::memory_order_relaxed);
    if (passage.payload > 0 || first.kind == Kind::Barrier) {
      finish_in_lane(recurring, passage.payload);
    } else {
      settle();
      run_recurring(recurring);
    }
  }
  turn_.nudge();
  return true;
}

void Engine::run_recurring(const Recurring& recurring) {
  const std::span<const OperationPtr> all(recurring.operations);
  try {
    const uint64_t agreed = trace_.now();
    size_t from = 0;
    for (const size_t to : recurring.buckets) {
      run_operations({all[from]->request.kind, {}}, all.subspan(from, to - from), agreed);
      from = to;
    }
  } catch (const Error& error) {
    poison(error);
    for (const OperationPtr& operation : all)
      if (!operation->done()) fail(operation, error);
  }
}

/// All ranks have arrived, and with them their data: nothing is left to wait for.
void Engine::finish_in_lane(const Recurring& recurring, size_t payload) {
  const std::span<const OperationPtr> all(recurring.operations);
  const Request& first = all.front()->request;
  const uint64_t begun = trace_.now();
  const auto size = static_cast<size_t>(wiring_.size);
  std::array<const void*, 16> few{};
  std::vector<const void*> many(size > few.size() ? size : 0);
  const std::span<const void*> sources = many.empty() ? std::span(few).first(size) : std::span(many);
  size_t done = 0;
  for (size_t i = 0; payload > 0 && i < all.size(); ++i) {
    const size_t bytes = all[i]->request.bytes();
    if (first.kind == Kind::Broadcast) {
      if (first.root != wiring_.rank || all[i]->output != all[i]->input)
        std::memcpy(all[i]->output, lane_->payload(first.root, payload) + done, bytes);
    } else {
      for (size_t rank = 0; rank < size; ++rank) sources[rank] = lane_->payload(static_cast<int>(rank), payload) + done;
      reduce(first.dtype, reduction_of(first, wiring_.size), all[i]->output, sources, bytes / size_of(first.dtype));
    }
    done += bytes;
  }
  executed_ += static_cast<uint32_t>(all.size());
  count(all, payload);
  if (trace_.on()) trace_.add({first.kind, "lane", begun, begun}, all);
  for (const OperationPtr& operation : all) conclude(operation);
}

}  // namespace farandole
