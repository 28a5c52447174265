// Completion of staged calls: results, waits, and the release of memory.
#include <algorithm>
#include <utility>

#include "engine/device_marks.h"
#include "engine/staging.h"

namespace farandole {

using std::chrono::nanoseconds;

/// Start to copy the result of a completed operation back. Runs on the engine's thread.
void Staging::finish(StagedCall::Member& member) noexcept {
  Operation& operation = *member.operation;
  if (!operation.error && member.trouble) operation.error = member.trouble->named(operation.request.name);
  if (!operation.error && member.device != nullptr && !member.side && member.has_output) {
    const bool sized = traits_of(operation.request.kind).is_sized_by_plan();
    Request result = operation.request;
    if (sized) result.shape = operation.result_shape;
    try {
      if (result.bytes() > 0)
        member.device->copy_to_device(member.to, sized ? member.result.data() : member.input.data(), result.bytes(),
                                      member.device->to_device());
    } catch (const Error& error) {
      operation.error = error.named(operation.request.name);
    }
  }
  if (member.call->left_.fetch_sub(1) == 1) complete(member.call->shared_from_this());
}

void Staging::complete(const Call& call) noexcept {
  Leaving leaving;
  bool returns = false;
  bool is_broken = false;  // a failed operation may still run on the device
  for (const StagedCall::Member& member : call->members_) {
    const bool is_enqueued = member.side && member.side->after;
    returns = returns || member.has_output || is_enqueued;
    is_broken = is_broken || (member.side && member.side->is_begun && !is_enqueued);
  }
  try {
    if (returns) {
      const auto stream = [](CudaDevice& device) { return device.to_device(); };
      add_marks(call->returned_, call->members_, stream);
      add_ends(call->returned_, call->members_);
      leaving.marks = call->returned_;
    }
  } catch (const Error& error) {
    for (StagedCall::Member& member : call->members_)
      if (!member.operation->error) member.operation->error = error.named(member.operation->request.name);
    call->release(false);
  }
  if (is_broken) call->release(false);
  if (!returns) call->release(true);
  leaving.call = call;
  const std::lock_guard lock(mu_);
  if (returns) leaving_.push_back(std::move(leaving));
  for (const StagedCall::Member& member : call->members_) names_.erase(member.operation->request.name);
  call->done_ = true;
  under_way_.erase(call);
  changed_->notify_all();
}

void Staging::require_own_process() const {
  if (engine_->is_forked()) engine_->require_alive();  // throws; a thread that is missing here may hold the mutex
}

bool Staging::wait(StagedCall& call, nanoseconds limit) {
  require_own_process();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  Lock lock(mu_);
  changed_->wait_until(lock, deadline, [&] { return call.done_ || call.submitted_; });
  if (call.done_ || !call.submitted_) return call.done_;
  lock.unlock();
  for (StagedCall::Member& member : call.members_) {
    // A thread that waits drives the engine.
    const nanoseconds left = deadline - std::chrono::steady_clock::now();
    if (left <= nanoseconds(0) || !engine_->wait(*member.operation, left)) return false;
  }
  lock.lock();
  return changed_->wait_until(lock, deadline, [&] { return call.done_; });
}

void Staging::require_results() {
  const auto failure = engine_->devices().failure();
  if (!failure) return;
  engine_->require_alive();
  throw *failure;
}

bool Staging::is_done(const StagedCall& call) {
  require_own_process();
  const std::lock_guard lock(mu_);
  return call.done_;
}

bool Staging::wait_for_submissions(nanoseconds limit) {
  require_own_process();
  Lock lock(mu_);
  return changed_->wait_for(lock, limit, [&] { return arriving_.empty(); });
}

CudaMark Staging::copy_result(StagedCall& call, size_t index, CudaDevice& device, CudaDevice::Address to, size_t bytes,
                              CudaDevice::Stream stream) {
  StagedCall::Member& member = call.members_[index];
  Request result = member.operation->request;
  result.shape = member.operation->result_shape;
  if (member.is_copied) throw Error::invalid(result.name, "its result has been copied before");
  if (result.bytes() != bytes || member.device != &device)
    throw Error::invalid(result.name, "the result has " + std::to_string(result.bytes()) +
                                          " bytes; give a tensor of that size on the input's device");
  device.require_running(stream, result.name);
  member.is_copied = true;
  if (member.side && member.side->after) member.side->after->hold(stream);  // also for an empty result
  if (member.side && member.side->result.data() != nullptr) {
    if (bytes > 0) device.copy_within(to, member.side->result.address(), bytes, stream);
    member.side->result.end_in(stream);
    return device.mark(stream);
  }
  if (bytes > 0) device.copy_to_device(to, member.result.data(), bytes, stream);
  Leaving leaving;
  leaving.marks.push_back(std::make_shared<const CudaMark>(device.mark(stream)));
  leaving.buffer = std::move(member.result);
  CudaMark copied = device.mark(stream);
  const std::lock_guard lock(mu_);
  leaving_.push_back(std::move(leaving));
  changed_->notify_all();
  return copied;
}

void Staging::close() {
  if (engine_->is_forked()) return;  // the thread is the parent's
  const std::lock_guard ending(ending_);
  {
    const std::lock_guard lock(mu_);
    closing_ = true;  // from here on, add() neither starts the thread nor adds a call
    changed_->notify_all();
  }
  if (thread_.joinable()) thread_.join();
  std::deque<Call> waiting;
  {
    const std::lock_guard lock(mu_);
    waiting.swap(arriving_);
  }
  for (const Call& call : waiting) {
    if (!wait_briefly(call->arrived_)) call->release(false);
    fail(call, Error::closed("it was shut down while this operation was pending"));
  }
  drop_leaving();
}

void Staging::drop_leaving() noexcept {
  Lock lock(mu_);
  while (!leaving_.empty()) {
    Leaving gone = std::move(leaving_.front());
    leaving_.pop_front();
    lock.unlock();
    const bool works = wait_briefly(gone.marks);
    if (!works) gone.buffer.leak();
    if (gone.call) gone.call->release(works);
    lock.lock();
  }
}

}  // namespace farandole
