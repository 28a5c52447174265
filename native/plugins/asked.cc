#include "plugins/asked.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace farandole::plugins {
namespace {

/// What was asked for in one call, until all of it is done.
class Asked {
 public:
  Asked(const Ask& ask, const std::string& name, const Listener& listener, int size)
      : listener_(listener), members_(std::max<size_t>(ask.count, 1)), left_(members_.size()) {
    for (size_t i = 0; i < members_.size(); ++i) {
      members_[i] = {this, i};
      operations_.push_back(operation_of(ask, name, i, size));
    }
  }

  [[nodiscard]] const std::vector<OperationPtr>& operations() const { return operations_; }

 private:
  struct Member {
    Asked* asked;
    size_t index;
  };

  OperationPtr operation_of(const Ask& ask, const std::string& name, size_t index, int size) {
    auto operation = std::make_shared<Operation>();
    Request& request = operation->request;
    request.name = name;
    if (ask.grouped) {
      request.name += "_" + std::to_string(index + 1) + "of" + std::to_string(ask.count);
      request.group = name;
      request.group_size = static_cast<uint32_t>(ask.count);
    }
    request.kind = static_cast<Kind>(ask.kind);
    request.op = static_cast<ReduceOp>(ask.op);
    request.prescale = ask.prescale;
    request.postscale = ask.postscale;
    request.root = ask.root;
    request.cacheable = ask.cacheable;
    if (ask.splits_count > 0) request.splits.assign(ask.splits, ask.splits + ask.splits_count);
    if (ask.count > 0) {
      const Tensor& tensor = ask.tensors[index];
      request.dtype = static_cast<DType>(tensor.dtype);
      request.shape.assign(tensor.shape, tensor.shape + tensor.dims);
      operation->input = static_cast<const std::byte*>(tensor.input);
      operation->output = static_cast<std::byte*>(tensor.output);
    }
    validate(request, size);
    operation->listener = {&done, &allocate, &members_[index]};
    return operation;
  }

  static std::byte* allocate(void* cookie, Operation& operation, size_t bytes) noexcept {
    const auto& member = *static_cast<Member*>(cookie);
    const Listener& listener = member.asked->listener_;
    const auto& shape = operation.result_shape;
    void* memory =
        listener.allocate(listener.cookie, member.index, shape.data(), static_cast<int32_t>(shape.size()), bytes);
    if (memory == nullptr && bytes > 0)
      operation.error = Error::invalid(operation.request.name,
                                       "there is no memory for its result of " + std::to_string(bytes) + " bytes");
    return static_cast<std::byte*>(memory);
  }

  static void done(void* cookie, Operation&) noexcept {
    Asked* asked = static_cast<Member*>(cookie)->asked;
    if (asked->left_.fetch_sub(1) == 1) asked->finish();
  }

  void finish() noexcept {
    const std::unique_ptr<Asked> self(this);
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

void start(const Ask& ask, const std::string& name, const Listener& listener, Engine& engine) {
  auto asked = std::make_unique<Asked>(ask, name, listener, engine.size());
  const std::vector<OperationPtr> operations = asked->operations();
  engine.submit(operations, true);
  // From then on it belongs to its operations; it may be gone already.
  static_cast<void>(asked.release());
}

void tell(const Listener& listener, int32_t error, const std::string& text) noexcept {
  const Outcome outcome{error, text.c_str(), nullptr, 0, -1};
  listener.done(listener.cookie, &outcome);
}

}  // namespace farandole::plugins
