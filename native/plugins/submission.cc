#include "plugins/submission.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

namespace farandole::plugins {

RequestView view_of(const Request& request, const std::string& name) {
  return {.name = name,
          .kind = static_cast<Kind>(request.kind),
          .op = static_cast<ReduceOp>(request.op),
          .prescale = request.prescale,
          .postscale = request.postscale,
          .root = request.root,
          .splits = {request.splits, request.splits_count},
          .cacheable = request.cacheable,
          .grouped = request.grouped};
}

TensorView view_of(const Tensor& tensor) {
  return {.input = static_cast<const std::byte*>(tensor.input),
          .output = static_cast<std::byte*>(tensor.output),
          .room = tensor.room,
          .dtype = static_cast<DType>(tensor.dtype),
          .shape = {tensor.shape, static_cast<size_t>(tensor.dims)}};
}

namespace {

/// The operations of one request, until all of them have completed.
class Submission {
 public:
  Submission(const Request& request, const std::string& name, const Listener& listener, int size)
      : listener_(listener), members_(std::max<size_t>(request.count, 1)), left_(members_.size()) {
    const RequestView view = view_of(request, name);
    operations_.resize(members_.size());
    for (size_t i = 0; i < members_.size(); ++i) {
      const TensorView tensor = request.count > 0 ? view_of(request.tensors[i]) : TensorView{};
      build(operations_[i], view, tensor, i, members_.size(), size);
      members_[i] = {this, i};
      operations_[i]->listener = {&done, &allocate, &members_[i]};
    }
  }

  [[nodiscard]] const std::vector<OperationPtr>& operations() const { return operations_; }

 private:
  struct Member {
    Submission* submission;
    size_t index;
  };

  static std::byte* allocate(void* cookie, Operation& operation, size_t bytes) noexcept {
    const auto& member = *static_cast<Member*>(cookie);
    const Listener& listener = member.submission->listener_;
    const auto& shape = operation.result_shape;
    void* memory =
        listener.allocate(listener.cookie, member.index, shape.data(), static_cast<int32_t>(shape.size()), bytes);
    if (memory == nullptr && bytes > 0)
      operation.error = Error::invalid(operation.request.name,
                                       "there is no memory for its result of " + std::to_string(bytes) + " bytes");
    return static_cast<std::byte*>(memory);
  }

  static void done(void* cookie, Operation&) noexcept {
    Submission* submission = static_cast<Member*>(cookie)->submission;
    if (submission->left_.fetch_sub(1) == 1) submission->finish();
  }

  void finish() noexcept {
    const std::unique_ptr<Submission> self(this);
    for (const OperationPtr& operation : operations_)
      if (operation->error) return report(listener_, *operation);
    report(listener_, *operations_.front());
  }

  Listener listener_;
  std::vector<Member> members_;
  std::vector<OperationPtr> operations_;
  std::atomic<size_t> left_;
};

}  // namespace

void start(const Request& request, const std::string& name, const Listener& listener, Engine& engine) {
  auto submission = std::make_unique<Submission>(request, name, listener, engine.size());
  const std::vector<OperationPtr> operations = submission->operations();
  engine.submit(operations, true);
  // The operations own the submission from here on, and may have deleted it already.
  static_cast<void>(submission.release());
}

void run_on_device(const Request& request, const std::string& name, CudaDevice::Stream stream, const Listener& listener,
                   Staging& staging) {
  CudaDevice& device = CudaDevice::of_stream(stream);
  std::vector<StagedTensor> tensors(request.count);
  for (size_t i = 0; i < request.count; ++i) {
    tensors[i].view = view_of(request.tensors[i]);
    tensors[i].device = &device;
    tensors[i].input_stream = tensors[i].output_stream = stream;
    if (!request.grouped) tensors[i].name = name;
  }
  const std::shared_ptr<StagedCall> call = staging.start(view_of(request, name), tensors);
  while (!staging.wait(*call, std::chrono::seconds(1))) {
  }
  // Also when a member has failed: copies of the others may still write to the caller's memory.
  call->hold(device, stream);
  for (size_t i = 0; i < call->size(); ++i)
    if (call->operation(i)->error) throw Error(*call->operation(i)->error);
  report(listener, *call->operation(0));
}

void report(const Listener& listener, const Operation& operation) noexcept {
  if (operation.error) return report(listener, static_cast<int32_t>(operation.error->kind), operation.error->what());
  const auto& splits = operation.received_splits;
  const Outcome outcome{-1, "", splits.data(), splits.size(), operation.last_joined};
  listener.done(listener.cookie, &outcome);
}

void report(const Listener& listener, int32_t error, const std::string& text) noexcept {
  const Outcome outcome{error, text.c_str(), nullptr, 0, -1};
  listener.done(listener.cookie, &outcome);
}

}  // namespace farandole::plugins
