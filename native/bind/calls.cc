#include "bind/calls.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "bind/released.h"

namespace nb = nanobind;

namespace farandole {
namespace {

std::string_view text_of(const nb::str& name) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &length);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<size_t>(length)};
}

ReduceOp op_of(std::string_view name, int op) {
  if (op < 0 || op > 5) throw Error::invalid(std::string(name), "unknown reduce op " + std::to_string(op));
  return static_cast<ReduceOp>(op);
}

/// A mark that lasts as long as this object; both ends under the GIL.
class Busy {
 public:
  explicit Busy(bool& busy) : busy_(busy) { busy_ = true; }
  ~Busy() { busy_ = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  bool& busy_;
};

}  // namespace

void require_room(Kind kind, const Captured& output, const Captured& input, std::string_view name) {
  if (output.dtype != input.dtype) throw Error::invalid(std::string(name), "the output differs from the input in type");
  if (!is_sized_by_plan(kind) && !std::ranges::equal(output.shape, input.shape))
    throw Error::invalid(std::string(name), "the output differs from the input in shape");
  if (!output.writable) throw Error::invalid(std::string(name), "its memory is read-only; pass a writable tensor");
}

bool Calls::Call::is_free() const {
  for (const OperationPtr& operation : given)
    if (operation.use_count() != 2) return false;
  // Whoever had the others has let go of them after its last access.
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

Calls::Tensors Calls::tensors_of(Kind kind, std::string_view name, nb::handle input, nb::handle output) {
  Tensors tensors{capture(input, name), std::nullopt};
  if (output.is_none()) return tensors;
  tensors.output = output.is(input) ? tensors.input : capture(output, name);
  require_room(kind, *tensors.output, tensors.input, name);
  return tensors;
}

std::vector<Calls::Tensors> Calls::tensors_of(Kind kind, std::string_view name, const Sequence& inputs,
                                              const Sequence& outputs) {
  const size_t count = nb::len(inputs);
  const size_t given = nb::len(outputs);
  if (given != 0 && given != count)
    throw Error::invalid(std::string(name), "a group needs one output for each input, or none at all");
  std::vector<Tensors> all;
  all.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const nb::object input = inputs[i];
    const nb::object output = given != 0 ? nb::object(outputs[i]) : nb::none();
    all.push_back(tensors_of(kind, name, input, output));
  }
  return all;
}

Calls::Call& Calls::call_of(Kept& kept, std::string_view name, bool cacheable, Call& once) {
  auto at = kept.find(name);
  if (at == kept.end()) {
    if (!cacheable || kept.size() >= capacity_) return once;
    at = kept.try_emplace(std::string(name)).first;
  }
  return at->second.busy ? once : at->second;
}

void Calls::name_members(Call& call, std::string_view name, size_t count, bool grouped) {
  call.given.clear();
  for (size_t i = 0; i < count; ++i) {
    auto operation = std::make_shared<Operation>();
    Request& request = operation->request;
    request.name = name;
    if (grouped) {
      request.name += "_" + std::to_string(i + 1) + "of" + std::to_string(count);
      request.group = name;
      request.group_size = static_cast<uint32_t>(count);
    }
    call.given.push_back(std::move(operation));
  }
}

void Calls::prepare(Call& call, std::string_view name, const Terms& terms, std::span<const Tensors> tensors,
                    bool grouped) {
  bool changed = call.given.size() != tensors.size();
  if (changed) {
    name_members(call, name, tensors.size(), grouped);
  } else if (!call.is_free()) {
    changed = true;
    for (OperationPtr& operation : call.given) {
      auto next = std::make_shared<Operation>();
      next->request = operation->request;
      operation = std::move(next);
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    Operation& operation = *call.given[i];
    operation.renew();
    operation.input = tensors[i].input.data;
    operation.output = tensors[i].output ? tensors[i].output->data : nullptr;
    operation.room = tensors[i].output ? tensors[i].output->bytes() : 0;
    changed = fit(operation.request, terms, tensors[i].input) || changed;
  }
  if (!changed) return;
  // Kept only when it is valid: what is as it was last time is not looked at again.
  std::vector<OperationPtr> given = std::move(call.given);
  call.given.clear();
  for (const OperationPtr& operation : given) validate(operation->request, engine_->size());
  call.recurring.operations = given;
  call.recurring.arrange();
  call.given = std::move(given);
}

bool Calls::fit(Request& request, const Terms& terms, const Captured& input) {
  if (request.kind == terms.kind && request.op == terms.op && request.prescale == terms.prescale &&
      request.postscale == terms.postscale && request.cacheable == terms.cacheable && request.dtype == input.dtype &&
      std::ranges::equal(request.shape, input.shape))
    return false;
  request.kind = terms.kind;
  request.op = terms.op;
  request.prescale = terms.prescale;
  request.postscale = terms.postscale;
  request.cacheable = terms.cacheable;
  request.dtype = input.dtype;
  request.shape.assign(input.shape.begin(), input.shape.end());
  return true;
}

void Calls::start(std::span<const OperationPtr> operations, std::span<const Tensors> tensors, bool wake) {
  for (size_t i = 0; i < tensors.size(); ++i)
    operations[i]->keep = keep_alive(tensors[i].input, tensors[i].output ? &*tensors[i].output : nullptr);
  try {
    engine_->submit(operations, wake);
  } catch (...) {
    for (const OperationPtr& operation : operations) operation->keep.reset();
    throw;
  }
  sweep_references();  // only now: a forked child is turned away above, and must take no lock before
}

void Calls::run(Call& call, std::span<const Tensors> tensors) {
  bool done = false;
  {
    const Busy busy(call.busy);
    std::optional<Released> released;
    done = engine_->run_in_lane(call.recurring, [&] { released.emplace(*engine_); });
  }
  if (!done) {
    start(call.given, tensors, false);
    // Another thread may use the call from here on.
    const std::vector<OperationPtr> operations = call.given;
    GroupHandle(engine_, operations).wait();
    return;
  }
  for (const OperationPtr& operation : call.given)
    if (operation->error) throw Error(*operation->error);
}

void Calls::reduce(nb::str name, nb::handle input, nb::handle output, int op, double prescale, double postscale) {
  const std::string_view text = text_of(name);
  const Tensors tensors = tensors_of(Kind::Allreduce, text, input, output);
  Call once;
  Call& call = call_of(singles_, text, true, once);
  prepare(call, text, {Kind::Allreduce, op_of(text, op), prescale, postscale, true}, {&tensors, 1}, false);
  run(call, {&tensors, 1});
}

Handle Calls::start_reduce(nb::str name, nb::handle input, nb::handle output, int op, double prescale,
                           double postscale) {
  const std::string_view text = text_of(name);
  const Tensors tensors = tensors_of(Kind::Allreduce, text, input, output);
  Call once;
  Call& call = call_of(singles_, text, true, once);
  prepare(call, text, {Kind::Allreduce, op_of(text, op), prescale, postscale, true}, {&tensors, 1}, false);
  start(call.given, {&tensors, 1}, true);
  return {engine_, call.given.front()};
}

void Calls::reduce_group(const std::string& name, const Sequence& inputs, const Sequence& outputs, int op,
                         double prescale, double postscale, bool cacheable) {
  const std::vector<Tensors> tensors = tensors_of(Kind::Allreduce, name, inputs, outputs);
  if (tensors.empty()) return;
  Call once;
  Call& call = call_of(groups_, name, cacheable, once);
  prepare(call, name, {Kind::Allreduce, op_of(name, op), prescale, postscale, cacheable}, tensors, true);
  run(call, tensors);
}

GroupHandle Calls::start_group(int kind, const std::string& name, const Sequence& inputs, const Sequence& outputs,
                               int op, double prescale, double postscale, bool cacheable) {
  if (kind < 0 || kind >= kKinds) throw Error::invalid(name, "unknown kind of operation");
  const Kind what = static_cast<Kind>(kind);
  const std::vector<Tensors> tensors = tensors_of(what, name, inputs, outputs);
  if (tensors.empty()) return {engine_, {}};
  Call once;
  Call& call = call_of(groups_, name, cacheable, once);
  prepare(call, name, {what, op_of(name, op), prescale, postscale, cacheable}, tensors, true);
  start(call.given, tensors, true);
  return {engine_, call.given};
}

GroupHandle Calls::start_each(const Sequence& names, const Sequence& inputs, const Sequence& outputs, int op,
                              double prescale, double postscale, bool wake) {
  const size_t count = nb::len(names);
  std::vector<Tensors> tensors;
  std::vector<OperationPtr> operations;
  tensors.reserve(count);
  operations.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto name = nb::cast<nb::str>(nb::object(names[i]));
    const std::string_view text = text_of(name);
    tensors.push_back(tensors_of(Kind::Allreduce, text, nb::object(inputs[i]), nb::object(outputs[i])));
    Call once;
    Call& call = call_of(singles_, text, true, once);
    prepare(call, text, {Kind::Allreduce, op_of(text, op), prescale, postscale, true}, {&tensors[i], 1}, false);
    operations.push_back(call.given.front());
  }
  if (count > 0) start(operations, tensors, wake);
  return {engine_, operations};
}

}  // namespace farandole
