#include "engine/trace.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kMost = 1'000'000;

}  // namespace

void Trace::start(bool marks_plans) {
  const std::lock_guard lock(mu_);
  taken_ = TraceBatch();
  ++batch_;
  plan_name_ = TraceBatch::kPlan;
  dropped_ = 0;
  scale_ = TickScale();
  since_ = ticks();
  marks_plans_.store(marks_plans, std::memory_order_relaxed);
  on_.store(true, std::memory_order_relaxed);
}

void Trace::stop() {
  const std::lock_guard lock(mu_);
  on_.store(false, std::memory_order_relaxed);
  marks_plans_.store(false, std::memory_order_relaxed);
}

void Trace::add(const TracedBucket& bucket, std::span<const OperationPtr> operations) {
  const uint64_t ended = ticks();
  const std::lock_guard lock(mu_);
  // The caller may have read on() before stop() and start().
  if (!on() || ended < since_) return;
  const uint64_t begun = std::max(bucket.begun, since_);
  const uint64_t agreed = bucket.agreed == 0 ? begun : std::max(bucket.agreed, since_);
  const auto place = static_cast<uint32_t>(taken_.buckets_.size());
  if (taken_.records_.size() < kMost) taken_.buckets_.push_back({agreed, begun, ended, bucket.algorithm, bucket.kind});
  for (const OperationPtr& operation : operations) {
    if (!has_room()) continue;
    const uint64_t asked = operation->submitted_ticks == 0 ? 0 : std::max(operation->submitted_ticks, since_);
    taken_.records_.push_back({asked, operation->request.bytes(), name_of(*operation), place});
  }
}

void Trace::add_plan(size_t buckets) {
  const uint64_t now = ticks();
  const std::lock_guard lock(mu_);
  if (!marks_plans() || !has_room()) return;
  if (plan_name_ == TraceBatch::kPlan) {
    plan_name_ = static_cast<uint32_t>(taken_.names_.size());
    taken_.names_.emplace_back("plans");
  }
  taken_.records_.push_back({now, buckets, plan_name_, TraceBatch::kPlan});
}

bool Trace::has_room() {
  if (taken_.records_.size() < kMost) return true;
  ++dropped_;
  return false;
}

uint32_t Trace::name_of(Operation& operation) {
  if (operation.traced_in != batch_) {
    operation.traced_in = batch_;
    operation.trace_name = static_cast<uint32_t>(taken_.names_.size());
    taken_.names_.push_back(operation.request.name);
  }
  return operation.trace_name;
}

TraceBatch Trace::drain() {
  TraceBatch batch;
  {
    const std::lock_guard lock(mu_);
    std::swap(batch, taken_);
    batch.scale_ = scale_;
    ++batch_;
    plan_name_ = TraceBatch::kPlan;
  }
  batch.scale_.adjust();
  return batch;
}

uint64_t Trace::dropped() {
  const std::lock_guard lock(mu_);
  return dropped_;
}

}  // namespace farandole
