#include "engine/staging.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "engine/device_marks.h"

namespace farandole {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr microseconds kShortNap{10};  // between two checks of the devices
constexpr microseconds kLongNap{100};  // the same, after kShortNaps short naps
constexpr int kShortNaps = 50;

void require_running(const StagedTensor& tensor, std::string_view name) {
  if (tensor.device == nullptr) return;
  tensor.device->require_running(tensor.input_stream, std::string(name));
  if (tensor.view.output != nullptr && tensor.output_stream != tensor.input_stream)
    tensor.device->require_running(tensor.output_stream, std::string(name));
}

}  // namespace

Staging::Staging(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), pool_(engine_->pinned()) {}

Staging::~Staging() {
  engine_->shutdown();  // first: it completes operations, whose listeners use this object
  close();
  if (!engine_->is_forked()) return;
  // The thread runs in the parent process. The end of the condition variable would wait for it.
  static_cast<void>(new std::thread(std::move(thread_)));
  static_cast<void>(changed_.release());
}

std::shared_ptr<StagedCall> Staging::start(RequestView request, std::span<const StagedTensor> tensors) {
  engine_->require_alive();
  for (const StagedTensor& tensor : tensors) require_running(tensor, request.grouped ? request.name : tensor.name);
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
    withdraw(call, wait_briefly(call->arrived_) && !call->arrived_.empty());
    throw;
  }
  try {
    add(call);
    if (call->arrived_.empty()) submit(call);
  } catch (...) {
    withdraw(call, wait_briefly(call->arrived_));
    throw;
  }
  return call;
}

/// Leave the call to the thread, which submits it once its copies have arrived. Throws Error (Closed) after close(),
/// which may have run since the call has claimed its names: the thread has ended then.
void Staging::add(const Call& call) {
  const std::lock_guard lock(mu_);
  require_open();
  if (!thread_.joinable()) thread_ = std::thread(&Staging::run, this);
  under_way_.insert(call);
  if (!call->arrived_.empty()) arriving_.push_back(call);
  changed_->notify_all();
}

/// Undo the start of a call that was not submitted.
void Staging::withdraw(const Call& call, bool device_works) {
  call->release(device_works);
  const std::lock_guard lock(mu_);
  for (const auto& member : call->members_) names_.erase(member.operation->request.name);
  under_way_.erase(call);
}

void Staging::prepare(StagedCall::Member& member, RequestView request, const StagedTensor& tensor, size_t index,
                      size_t count) {
  TensorView view = tensor.view;
  member.device = tensor.device;
  member.keep = tensor.keep;
  if (member.device != nullptr && prepare_side(member, request, tensor)) {
    view.on_device = true;
  } else if (member.device != nullptr) {
    size_t bytes = size_of(view.dtype);
    for (const int64_t extent : view.shape) bytes *= static_cast<size_t>(extent);
    member.from = reinterpret_cast<CudaDevice::Address>(view.input);
    member.has_output = view.output != nullptr || !traits_of(request.kind).is_sized_by_plan();
    member.to = reinterpret_cast<CudaDevice::Address>(view.output);
    member.input = pool_->take(*member.device, bytes);
    if (traits_of(request.kind).is_sized_by_plan() && view.output != nullptr)
      member.result = pool_->take(*member.device, view.room);
    view.input = member.input.data();
    if (!traits_of(request.kind).is_sized_by_plan()) view.output = member.input.data();
    else if (view.output != nullptr) view.output = member.result.data();
    view.on_device = true;
  }
  build(member.operation, request, view, index, count, engine_->size());
  member.operation->side = member.side;
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

/// Prepare the operation for submission in device memory; return whether it will be submitted so.
bool Staging::prepare_side(StagedCall::Member& member, const RequestView& request, const StagedTensor& tensor) {
  const int divisor = request.op == ReduceOp::Average ? engine_->size() : 1;
  const Reduction reduction{request.op, request.prescale, request.postscale, divisor};
  if (!engine_->devices().takes(std::string(request.name), request.kind, tensor.view.dtype, reduction, *member.device))
    return false;
  member.side = std::make_shared<DeviceSide>();
  member.side->device = member.device;
  member.has_output = tensor.view.output != nullptr || !traits_of(request.kind).is_sized_by_plan();
  member.to = reinterpret_cast<CudaDevice::Address>(tensor.view.output);
  return true;
}

/// Needs the lock.
void Staging::require_open() const {
  if (closing_) throw Error::closed("it was shut down");
}

void Staging::claim_names(const StagedCall& call) {
  const std::lock_guard lock(mu_);
  require_open();
  for (size_t i = 0; i < call.members_.size(); ++i) {
    const std::string& name = call.members_[i].operation->request.name;
    if (names_.insert(name).second) continue;
    for (size_t taken = 0; taken < i; ++taken) names_.erase(call.members_[taken].operation->request.name);
    throw Error::invalid(name,
                         "an operation of the same name is still in "
                         "flight; wait for it or use another name");
  }
}

void Staging::enqueue(StagedCall& call, std::span<const StagedTensor> tensors) {
  std::map<std::pair<CudaDevice*, CudaDevice::Stream>, StagedCall::Mark> ordered;
  std::set<const CudaMark*> held;  // marks that the stream of the copies waits for
  const auto follow = [&](StagedCall::Member& member, CudaDevice::Stream stream) {
    StagedCall::Mark& mark = ordered[{member.device, stream}];
    if (!mark) mark = std::make_shared<const CudaMark>(member.device->mark(stream));
    if (member.side) member.side->before.push_back(mark);
    else if (held.insert(mark.get()).second) mark->hold(member.device->to_host());
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].device == nullptr) continue;
    follow(call.members_[i], tensors[i].input_stream);
    if (tensors[i].view.output != nullptr) follow(call.members_[i], tensors[i].output_stream);
  }
  try {
    for (StagedCall::Member& member : call.members_) {
      const Request& request = member.operation->request;
      const bool gives = !traits_of(request.kind).has_root || request.root == engine_->rank();
      if (member.device != nullptr && !member.side && gives && request.bytes() > 0)
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
      changed_->wait(lock);
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

/// Submit the first call if its inputs have arrived, and free memory that is not used any more. Checks the first call
/// only: copies of one device complete in order, and calls on other devices are submitted later at worst.
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
      changed_->notify_all();
    }
  }
  if (leaving_.empty()) return moved;
  lock.unlock();
  engine_->watch_devices();
  lock.lock();
  const Marks& marks = leaving_.front().marks;  // other threads only add at the end
  bool works = true;
  lock.unlock();
  try {
    if (!passed(marks)) {
      lock.lock();
      return moved;
    }
  } catch (const Error&) {
    works = false;  // the next operation throws the reason
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
    // An abandoned transport may still use the memory; see World::has_abandoned().
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
  changed_->notify_all();
}

void Staging::fail(const Call& call, const Error& error) {
  for (StagedCall::Member& member : call->members_)
    member.operation->error = error.named(member.operation->request.name);
  complete(call);
}

}  // namespace farandole
