#include "plugins/submission.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace farandole::plugins {
namespace {

/// The operations of one request, until all of them have completed.
class Submission {
 public:
  Submission(const Request& request, const std::string& name, const Listener& listener, int size)
      : listener_(listener), members_(std::max<size_t>(request.count, 1)), left_(members_.size()) {
    const RequestView view{.name = name,
                           .kind = static_cast<Kind>(request.kind),
                           .op = static_cast<ReduceOp>(request.op),
                           .prescale = request.prescale,
                           .postscale = request.postscale,
                           .root = request.root,
                           .splits = {request.splits, request.splits_count},
                           .cacheable = request.cacheable,
                           .grouped = request.grouped};
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

  static TensorView view_of(const Tensor& tensor) {
    return {.input = static_cast<const std::byte*>(tensor.input),
            .output = static_cast<std::byte*>(tensor.output),
            .dtype = static_cast<DType>(tensor.dtype),
            .shape = {tensor.shape, static_cast<size_t>(tensor.dims)}};
  }

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
    for (const OperationPtr& operation : operations_) {
      if (!operation->error) continue;
      return tell(listener_, static_cast<int32_t>(operation->error->kind), operation->error->what());
    }
    const Operation& first = *operations_.front();
    const Outcome outcome{-1, "", first.received_splits.data(), first.received_splits.size(), first.last_joined};
    listener_.done(listener_.cookie, &outcome);
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
  // Its operations own it from here on, and may have deleted it already.
  static_cast<void>(submission.release());
}

void tell(const Listener& listener, int32_t error, const std::string& text) noexcept {
  const Outcome outcome{error, text.c_str(), nullptr, 0, -1};
  listener.done(listener.cookie, &outcome);
}

}  // namespace farandole::plugins
