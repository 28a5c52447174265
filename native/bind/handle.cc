#include "bind/handle.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "bind/capture.h"
#include "bind/dlpack.h"
#include "bind/released.h"

namespace nb = nanobind;

namespace farandole {
namespace {

constexpr std::chrono::microseconds kNap{50};  // between two checks of a copy

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

nb::object array_of(const OperationPtr& operation) {
  if (!operation->result) return nb::none();
  const dlpack::DataType type = dlpack_type(operation->request.dtype);
  std::vector<size_t> shape(operation->result_shape.begin(), operation->result_shape.end());
  auto* owner = new OperationPtr(operation);
  const nb::capsule capsule(owner, [](void* held) noexcept { delete static_cast<OperationPtr*>(held); });
  return nb::cast(nb::ndarray<nb::array_api>(operation->result->data(), shape.size(), shape.data(), capsule, nullptr,
                                             nb::dlpack::dtype{type.code, type.bits, type.lanes}));
}

/// Waits until `passed` returns true, without the GIL. Throws the error of a signal handler.
template <class Passed>
void wait_until(Engine& engine, Passed passed) {
  for (bool done = false; !done;) {
    {
      const Released released(engine);
      const auto until = std::chrono::steady_clock::now() + kSignalsEvery;
      while (!(done = passed()) && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(kNap);
    }
    if (!done && PyErr_CheckSignals() != 0) throw nb::python_error();
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

Handle::Handle(std::shared_ptr<Engine> engine, std::span<const OperationPtr> operations) : engine_(std::move(engine)) {
  if (operations.size() == 1) {
    single_ = operations.front();
  } else {
    several_.assign(operations.begin(), operations.end());
  }
}

bool Handle::done() const {
  if (staged_)
    return staged_->staging->is_done(*staged_->call) && (staged_->api != nullptr || staged_->call->has_returned());
  return std::ranges::all_of(operations(), [](const OperationPtr& operation) { return operation->done(); });
}

void Handle::wait() {
  if (staged_) wait_staged();
  else wait_for(*engine_, operations());
  for (size_t i = 0; i < count(); ++i)
    if (operation(i)->error) throw *operation(i)->error;
}

void Handle::wait_staged() {
  Staging& staging = *staged_->staging;
  StagedCall& call = *staged_->call;
  for (bool done = staging.is_done(call); !done;) {
    {
      const Released released(*engine_);
      done = staging.wait(call, kSignalsEvery);
    }
    if (!done && PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  sweep_references();
  if (staged_->api == nullptr) {
    wait_until(*engine_, [&call] { return call.has_returned(); });
    return staging.require_results();
  }
  for (CudaDevice* device : call.devices()) call.hold(*device, current_stream(*staged_->api, *device));
}

const OperationPtr& Handle::operation(size_t index) const {
  return staged_ ? staged_->call->operation(index) : operations()[index];
}

const OperationPtr& Handle::only() const {
  if (count() != 1) throw std::logic_error("a handle of several operations has no single result");
  return operation(0);
}

nb::object Handle::result(size_t index) const {
  if (!staged_ || !staged_->call->is_on_device(index)) return array_of(operation(index));
  if (!staged_->call->has_result(index)) return nb::none();
  return nb::cast(StagedResult(engine_, *staged_, index));
}

nb::object Handle::result() {
  wait();
  static_cast<void>(only());
  return result(0);
}

nb::list Handle::results() {
  wait();
  nb::list results;
  for (size_t i = 0; i < count(); ++i) results.append(result(i));
  return results;
}

nb::tuple StagedResult::shape() const {
  nb::list extents;
  for (const int64_t extent : part_.call->operation(index_)->result_shape) extents.append(extent);
  return nb::tuple(extents);
}

void StagedResult::copy_to(nb::handle tensor) {
  const Request& request = part_.call->operation(index_)->request;
  const Captured to = capture(tensor, request.name);
  if (to.device == nullptr || to.dtype != request.dtype)
    throw Error::invalid(request.name, "the result needs a tensor of its type on the input's device");
  const auto address = reinterpret_cast<CudaDevice::Address>(to.data);
  const CudaMark copied = part_.staging->copy_result(*part_.call, index_, *to.device, address, to.bytes(), to.stream);
  if (to.api == nullptr) wait_until(*engine_, [&copied] { return copied.passed(); });
}

std::vector<int64_t> Handle::received_splits() {
  wait();
  return only()->received_splits;
}

int Handle::last_joined() {
  wait();
  return only()->last_joined;
}

int Handle::source() {
  wait();
  return only()->source;
}

}  // namespace farandole
