#include "engine/operation.h"

#include <algorithm>
#include <string>

namespace farandole {
namespace {

OperationPtr named_operation(const RequestView& view, size_t index, size_t count) {
  auto operation = std::make_shared<Operation>();
  Request& request = operation->request;
  request.name = view.name;
  if (view.grouped) {
    request.name += "_" + std::to_string(index + 1) + "of" + std::to_string(count);
    request.group = view.name;
    request.group_size = static_cast<uint32_t>(count);
  }
  request.splits.assign(view.splits.begin(), view.splits.end());
  return operation;
}

bool is_same(const Request& request, const RequestView& view, const TensorView& tensor) {
  return request.kind == view.kind && request.op == view.op && request.prescale == view.prescale &&
         request.postscale == view.postscale && request.root == view.root && request.cacheable == view.cacheable &&
         request.dtype == tensor.dtype && request.on_device == tensor.on_device &&
         std::ranges::equal(request.shape, tensor.shape);
}

}  // namespace

void Operation::renew() {
  error.reset();
  result.reset();
  result_shape.clear();
  received_splits.clear();
  last_joined = -1;
  done_.store(false, std::memory_order_relaxed);
}

bool build(OperationPtr& operation, const RequestView& view, const TensorView& tensor, size_t index, size_t count,
           int size) {
  const bool made = operation == nullptr;
  if (made) {
    operation = named_operation(view, index, count);
  } else {
    operation->renew();
  }
  operation->input = tensor.input;
  operation->output = tensor.output;
  operation->room = tensor.room;
  Request& request = operation->request;
  if (!made && is_same(request, view, tensor)) return false;
  request.kind = view.kind;
  request.op = view.op;
  request.prescale = view.prescale;
  request.postscale = view.postscale;
  request.root = view.root;
  request.cacheable = view.cacheable;
  request.dtype = tensor.dtype;
  request.on_device = tensor.on_device;
  request.shape.assign(tensor.shape.begin(), tensor.shape.end());
  validate(request, size);
  return true;
}

}  // namespace farandole
