#include "engine/staging.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace farandole {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr size_t kKeptPinned = size_t{1} << 30;  // bytes of unused pinned memory kept for reuse
constexpr microseconds kShortNap{10};            // between two looks at the devices
constexpr microseconds kLongNap{100};            // the same after kShortNaps of them
constexpr int kShortNaps = 50;
constexpr uint64_t kFarewell = 1'000'000'000;  // ns; limit for copies under way when the staging closes

bool passed(const std::vector<CudaMark>& marks) {
  return std::ranges::all_of(marks, [](const CudaMark& mark) { return mark.passed(); });
}

/// Waits a moment for copies whose memory is about to be dropped; returns whether they are complete.
bool wait_briefly(const std::vector<CudaMark>& marks) noexcept {
  try {
    for (const uint64_t until = now_ns() + kFarewell; now_ns() < until; std::this_thread::sleep_for(kLongNap))
      if (passed(marks)) return true;
  } catch (const Error&) {
    // A broken device runs no copies, but nothing says when it stopped.
  }
  return false;
}

/// Adds a mark per device that has work of `members` in the stream that `stream` returns.
template <class Members, class StreamOf>
void add_marks(std::vector<CudaMark>& marks, const Members& members, StreamOf stream) {
  std::vector<CudaDevice*> devices;
  for (const auto& member : members)
    if (member.device != nullptr && std::ranges::find(devices, member.device) == devices.end())
      devices.push_back(member.device);
  for (CudaDevice* device : devices) marks.push_back(device->mark(stream(*device)));
}

}  // namespace

Staging::Staging(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), pool_(PinnedPool::make(kKeptPinned)) {}

Staging::~Staging() {
  close();
  if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));  // of the parent of this child
}

std::shared_ptr<StagedCall> Staging::start(RequestView request, std::span<const StagedTensor> tensors) {
  engine_->require_alive();
  const auto call = std::make_shared<StagedCall>();
  call->members_.resize(tensors.size());
  call->left_.store(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    call->members_[i].staging = this;
    call->members_[i].call = call.get();
    if (request.grouped) {
      prepare(call->members_[i], request, tensors[i], i, tensors.size());
    } else {
      request.name = tensors[i].name;
      prepare(call->members_[i], request, tensors[i], 0, 1);
    }
  }
  claim_names(*call);
  try {
    enqueue(*call, tensors);
  } catch (...) {
    call->release(wait_briefly(call->arrived_) && call->arrived_.size() > 0);
    const std::lock_guard lock(mu_);
    for (const auto& member : call->members_) names_.erase(member.operation->request.name);
    throw;
  }
  const std::lock_guard lock(mu_);
  arriving_.push_back(call);
  under_way_.insert(call);
  if (!thread_.joinable()) thread_ = std::thread(&Staging::run, this);
  changed_.notify_all();
  return call;
}

void Staging::prepare(StagedCall::Member& member, RequestView request, const StagedTensor& tensor, size_t index,
                      size_t count) {
  TensorView view = tensor.view;
  member.device = tensor.device;
  member.keep = tensor.keep;
  if (member.device != nullptr) {
    size_t bytes = size_of(view.dtype);
    for (const int64_t extent : view.shape) bytes *= static_cast<size_t>(extent);
    member.from = reinterpret_cast<CudaDevice::Address>(view.input);
    member.has_output = view.output != nullptr || !is_sized_by_plan(request.kind);
    member.to = reinterpret_cast<CudaDevice::Address>(view.output);
    member.input = pool_->take(*member.device, bytes);
    if (is_sized_by_plan(request.kind) && view.output != nullptr)
      member.result = pool_->take(*member.device, view.room);
    view.input = member.input.data();
    if (!is_sized_by_plan(request.kind)) view.output = member.input.data();
    else if (view.output != nullptr) view.output = member.result.data();
    view.on_device = true;
  }
  build(member.operation, request, view, index, count, engine_->size());
  member.operation->listener = {[](void* cookie, Operation&) noexcept {
                                  auto* member = static_cast<StagedCall::Member*>(cookie);
                                  member->staging->finish(*member);
                                },
                                [](void* cookie, Operation&, size_t bytes) noexcept -> std::byte* {
                                  auto* member = static_cast<StagedCall::Member*>(cookie);
                                  if (member->device == nullptr) return nullptr;
                                  try {
                                    member->result = member->staging->pool_->take(*member->device, bytes);
                                  } catch (const Error& error) {
                                    member->trouble = error;
                                  }
                                  return member->result.data();
                                },
                                &member};
}

void Staging::claim_names(const StagedCall& call) {
  const std::lock_guard lock(mu_);
  if (closing_) throw Error::closed("it was shut down");
  for (size_t i = 0; i < call.members_.size(); ++i) {
    const std::string& name = call.members_[i].operation->request.name;
    if (names_.insert(name).second) continue;
    for (size_t taken = 0; taken < i; ++taken) names_.erase(call.members_[taken].operation->request.name);
    throw Error::invalid(name, "an operation of the same name is still in flight; wait for it or use another name");
  }
}

void Staging::enqueue(StagedCall& call, std::span<const StagedTensor> tensors) {
  std::vector<std::pair<CudaDevice*, CudaDevice::Stream>> ordered;
  const auto follow = [&](CudaDevice& device, CudaDevice::Stream stream) {
    const std::pair work{&device, stream};
    if (std::ranges::find(ordered, work) != ordered.end()) return;
    device.mark(stream).hold(device.to_host());
    ordered.push_back(work);
  };
  for (const StagedTensor& tensor : tensors) {
    if (tensor.device == nullptr) continue;
    follow(*tensor.device, tensor.input_stream);
    if (tensor.view.output != nullptr) follow(*tensor.device, tensor.output_stream);
  }
  try {
    for (StagedCall::Member& member : call.members_) {
      const Request& request = member.operation->request;
      const bool gives = request.kind != Kind::Broadcast || request.root == engine_->rank();
      if (member.device != nullptr && gives && request.bytes() > 0)
        member.device->copy_to_host(member.input.data(), member.from, request.bytes(), member.device->to_host());
    }
  } catch (...) {
    add_marks(call.arrived_, call.members_, [](CudaDevice& device) { return device.to_host(); });
    throw;
  }
  add_marks(call.arrived_, call.members_, [](CudaDevice& device) { return device.to_host(); });
}

void Staging::run() noexcept {
  pthread_setname_np(pthread_self(), "farandole-stage");
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // by default the kernel wakes a sleeper up to 50 us late
  Lock lock(mu_);
  int idle = 0;
  while (!closing_) {
    if (arriving_.empty() && leaving_.empty()) {
      changed_.wait(lock);
      idle = 0;
    } else if (advance(lock)) {
      idle = 0;
    } else {
      lock.unlock();
      std::this_thread::sleep_for(++idle < kShortNaps ? kShortNap : kLongNap);
      lock.lock();
    }
  }
}

/// Submit the first call whose inputs have arrived, and drop what has left. The first call is looked at only: the
/// copies of one device are in order, and those of another device are at worst submitted later.
bool Staging::advance(Lock& lock) {
  bool moved = false;
  if (!arriving_.empty()) {
    const Call call = arriving_.front();
    lock.unlock();
    try {
      moved = passed(call->arrived_);
      if (moved) submit(call);
    } catch (const Error& error) {
      if (!moved) call->release(false);
      moved = true;
      fail(call, error);
    }
    lock.lock();
    if (moved) {
      arriving_.pop_front();
      changed_.notify_all();
    }
  }
  if (leaving_.empty()) return moved;
  const std::vector<CudaMark>& marks = leaving_.front().marks;  // other threads only add at the end
  bool works = true;
  lock.unlock();
  try {
    if (!passed(marks)) {
      lock.lock();
      return moved;
    }
  } catch (const Error&) {
    works = false;  // the user hears of it at the next operation
  }
  lock.lock();
  Leaving gone = std::move(leaving_.front());
  leaving_.pop_front();
  lock.unlock();
  if (!works) gone.buffer.leak();
  if (gone.call) gone.call->release(works);
  lock.lock();
  return true;
}

void Staging::submit(const Call& call) {
  std::vector<OperationPtr> operations;
  for (const StagedCall::Member& member : call->members_) {
    // A transport that was given up in the middle may still use the memory; see World::has_abandoned().
    member.operation->keep = call;
    operations.push_back(member.operation);
  }
  try {
    engine_->submit(operations, true);
  } catch (...) {
    for (const OperationPtr& operation : operations) operation->keep.reset();
    throw;
  }
  const std::lock_guard lock(mu_);
  call->submitted_ = true;
  changed_.notify_all();
}

void Staging::fail(const Call& call, const Error& error) {
  for (StagedCall::Member& member : call->members_)
    member.operation->error = error.named(member.operation->request.name);
  complete(call);
}

/// An operation has completed: copy its result back. On the engine's thread.
void Staging::finish(StagedCall::Member& member) noexcept {
  Operation& operation = *member.operation;
  if (!operation.error && member.trouble) operation.error = member.trouble->named(operation.request.name);
  if (!operation.error && member.device != nullptr && member.has_output) {
    const bool sized = is_sized_by_plan(operation.request.kind);
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
  for (const StagedCall::Member& member : call->members_) returns = returns || member.has_output;
  try {
    if (returns) {
      const auto stream = [](CudaDevice& device) { return device.to_device(); };
      add_marks(call->returned_, call->members_, stream);
      add_marks(leaving.marks, call->members_, stream);
    }
  } catch (const Error& error) {
    for (StagedCall::Member& member : call->members_)
      if (!member.operation->error) member.operation->error = error.named(member.operation->request.name);
    call->release(false);
  }
  if (!returns) call->release(true);
  leaving.call = call;
  const std::lock_guard lock(mu_);
  if (returns) leaving_.push_back(std::move(leaving));
  for (const StagedCall::Member& member : call->members_) names_.erase(member.operation->request.name);
  call->done_ = true;
  under_way_.erase(call);
  changed_.notify_all();
}

void Staging::require_own_process() const {
  if (engine_->is_forked()) engine_->require_alive();  // throws; a thread that is missing here may hold the mutex
}

bool Staging::wait(StagedCall& call, nanoseconds limit) {
  require_own_process();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  Lock lock(mu_);
  changed_.wait_until(lock, deadline, [&] { return call.done_ || call.submitted_; });
  if (call.done_ || !call.submitted_) return call.done_;
  lock.unlock();
  for (StagedCall::Member& member : call.members_) {
    // A thread that waits drives the engine.
    const nanoseconds left = deadline - std::chrono::steady_clock::now();
    if (left <= nanoseconds(0) || !engine_->wait(*member.operation, left)) return false;
  }
  lock.lock();
  return changed_.wait_until(lock, deadline, [&] { return call.done_; });
}

bool Staging::is_done(const StagedCall& call) {
  require_own_process();
  const std::lock_guard lock(mu_);
  return call.done_;
}

bool Staging::wait_for_submissions(nanoseconds limit) {
  require_own_process();
  Lock lock(mu_);
  return changed_.wait_for(lock, limit, [&] { return arriving_.empty(); });
}

CudaMark Staging::copy_result(StagedCall& call, size_t index, CudaDevice& device, CudaDevice::Address to, size_t bytes,
                              CudaDevice::Stream stream) {
  StagedCall::Member& member = call.members_[index];
  Request result = member.operation->request;
  result.shape = member.operation->result_shape;
  if (member.result.data() == nullptr) throw Error::invalid(result.name, "its result has been copied before");
  if (result.bytes() != bytes || member.device != &device)
    throw Error::invalid(result.name, "the result has " + std::to_string(result.bytes()) +
                                          " bytes; give a tensor of that size on the input's device");
  if (bytes > 0) device.copy_to_device(to, member.result.data(), bytes, stream);
  Leaving leaving;
  leaving.marks.push_back(device.mark(stream));
  leaving.buffer = std::move(member.result);
  CudaMark copied = device.mark(stream);
  const std::lock_guard lock(mu_);
  leaving_.push_back(std::move(leaving));
  changed_.notify_all();
  return copied;
}

void Staging::close() {
  if (engine_->is_forked()) return;  // the thread is the parent's
  {
    const std::lock_guard lock(mu_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  while (!arriving_.empty()) {
    const Call call = std::move(arriving_.front());
    arriving_.pop_front();
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
