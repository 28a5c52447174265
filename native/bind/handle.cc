#include "bind/handle.h"

#include <algorithm>
#include <chrono>

#include "bind/capture.h"
#include "bind/dlpack.h"
#include "bind/released.h"

namespace nb = nanobind;

namespace farandole {
namespace {

constexpr std::chrono::milliseconds kSignalsEvery{50};  // how soon Ctrl-C ends a wait

dlpack::DataType dlpack_type(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::Bool: return {dlpack::kBool, bits, 1};
    case DType::BFloat16: return {dlpack::kBfloat, bits, 1};
    case DType::Float16:
    case DType::Float32:
    case DType::Float64: return {dlpack::kFloat, bits, 1};
    case DType::UInt8:
    case DType::UInt16:
    case DType::UInt32:
    case DType::UInt64: return {dlpack::kUInt, bits, 1};
    default: return {dlpack::kInt, bits, 1};
  }
}

}  // namespace

void wait_for(Engine& engine, std::span<const OperationPtr> operations) {
  for (const OperationPtr& operation : operations) {
    for (bool done = operation->done(); !done;) {
      {
        const Released released(engine);
        done = engine.wait(*operation, kSignalsEvery);
      }
      if (!done && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }
  sweep_references();
}

void Handle::wait() {
  wait_for(*engine_, {&operation_, 1});
  if (operation_->error) throw *operation_->error;
}

std::optional<nb::ndarray<nb::array_api>> Handle::result() {
  wait();
  if (!operation_->result) return std::nullopt;
  const dlpack::DataType type = dlpack_type(operation_->request.dtype);
  std::vector<size_t> shape(operation_->result_shape.begin(), operation_->result_shape.end());
  auto* owner = new OperationPtr(operation_);
  const nb::capsule capsule(owner, [](void* held) noexcept { delete static_cast<OperationPtr*>(held); });
  return nb::ndarray<nb::array_api>(operation_->result->data(), shape.size(), shape.data(), capsule, nullptr,
                                    nb::dlpack::dtype{type.code, type.bits, type.lanes});
}

std::vector<int64_t> Handle::received_splits() {
  wait();
  return operation_->received_splits;
}

int Handle::last_joined() {
  wait();
  return operation_->last_joined;
}

bool GroupHandle::done() const {
  return std::ranges::all_of(operations_, [](const OperationPtr& operation) { return operation->done(); });
}

void GroupHandle::wait() {
  wait_for(*engine_, operations_);
  for (const OperationPtr& operation : operations_)
    if (operation->error) throw *operation->error;
}

std::vector<Handle> GroupHandle::parts() const {
  std::vector<Handle> parts;
  parts.reserve(operations_.size());
  for (const OperationPtr& operation : operations_) parts.emplace_back(engine_, operation);
  return parts;
}

}  // namespace farandole
