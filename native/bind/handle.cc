#include "bind/handle.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "bind/capture.h"
#include "bind/dlpack.h"
#include "bind/released.h"

namespace nb = nanobind;

namespace farandole {
namespace {

constexpr std::chrono::milliseconds kSignalsEvery{50};  // the longest delay until Ctrl-C ends a wait

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

using Array = nb::ndarray<nb::array_api>;

std::optional<Array> array_of(const OperationPtr& operation) {
  if (!operation->result) return std::nullopt;
  const dlpack::DataType type = dlpack_type(operation->request.dtype);
  std::vector<size_t> shape(operation->result_shape.begin(), operation->result_shape.end());
  auto* owner = new OperationPtr(operation);
  const nb::capsule capsule(owner, [](void* held) noexcept { delete static_cast<OperationPtr*>(held); });
  return Array(operation->result->data(), shape.size(), shape.data(), capsule, nullptr,
               nb::dlpack::dtype{type.code, type.bits, type.lanes});
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

Handle::Handle(std::shared_ptr<Engine> engine, std::span<const OperationPtr> operations) : engine_(std::move(engine)) {
  if (operations.size() == 1) {
    single_ = operations.front();
  } else {
    several_.assign(operations.begin(), operations.end());
  }
}

bool Handle::done() const {
  return std::ranges::all_of(operations(), [](const OperationPtr& operation) { return operation->done(); });
}

void Handle::wait() {
  wait_for(*engine_, operations());
  for (const OperationPtr& operation : operations())
    if (operation->error) throw *operation->error;
}

const OperationPtr& Handle::only() const {
  if (!single_) throw std::logic_error("a handle of several operations has no single result");
  return single_;
}

std::optional<Array> Handle::result() {
  wait();
  return array_of(only());
}

std::vector<std::optional<Array>> Handle::results() {
  wait();
  std::vector<std::optional<Array>> results;
  results.reserve(operations().size());
  for (const OperationPtr& operation : operations()) results.push_back(array_of(operation));
  return results;
}

std::vector<int64_t> Handle::received_splits() {
  wait();
  return only()->received_splits;
}

int Handle::last_joined() {
  wait();
  return only()->last_joined;
}

}  // namespace farandole
