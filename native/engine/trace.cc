#include "engine/trace.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kMost = 1'000'000;
constexpr uint32_t kPlan = std::numeric_limits<uint32_t>::max();

}  // namespace

void Trace::start(bool marks_plans) {
  const std::lock_guard lock(mu_);
  records_.clear();
  names_.clear();
  ++batch_;
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

void Trace::add(Kind kind, std::span<const OperationPtr> operations, uint64_t begun) {
  const uint64_t ended = ticks();
  const std::lock_guard lock(mu_);
  // Whoever adds may have looked at on() before a stop and a start.
  if (!on() || ended < since_) return;
  for (const OperationPtr& operation : operations) {
    if (!has_room()) continue;
    const uint64_t asked = operation->submitted_ticks == 0 ? 0 : std::max(operation->submitted_ticks, since_);
    records_.push_back({asked, std::max(begun, since_), ended, operation->request.bytes(), name_of(*operation), kind});
  }
}

void Trace::add_plan(size_t bundles) {
  const uint64_t now = ticks();
  const std::lock_guard lock(mu_);
  if (marks_plans() && has_room()) records_.push_back({0, now, now, bundles, kPlan, {}});
}

bool Trace::has_room() {
  if (records_.size() < kMost) return true;
  ++dropped_;
  return false;
}

uint32_t Trace::name_of(Operation& operation) {
  if (operation.traced_in != batch_) {
    operation.traced_in = batch_;
    operation.trace_name = static_cast<uint32_t>(names_.size());
    names_.push_back(operation.request.name);
  }
  return operation.trace_name;
}

std::vector<TraceEvent> Trace::drain() {
  std::vector<Record> records;
  std::vector<std::string> names;
  TickScale scale;
  {
    const std::lock_guard lock(mu_);
    records.swap(records_);
    names.swap(names_);
    ++batch_;
    scale = scale_;
  }
  scale.adjust();
  std::vector<TraceEvent> events;
  events.reserve(2 * records.size());
  for (const Record& record : records) {
    const uint64_t begun = scale.ns_of(record.begun);
    if (record.name == kPlan) {
      events.push_back({"plans", "plan", begun, begun, record.bytes});
      continue;
    }
    const std::string& name = names[record.name];
    if (record.asked != 0) events.push_back({name, "negotiate", scale.ns_of(record.asked), begun, 0});
    events.push_back({name, farandole::name_of(record.kind), begun, scale.ns_of(record.ended), record.bytes});
  }
  return events;
}

uint64_t Trace::dropped() {
  const std::lock_guard lock(mu_);
  return dropped_;
}

}  // namespace farandole
