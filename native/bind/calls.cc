#include "bind/calls.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "bind/bound.h"
#include "bind/overlap.h"
#include "bind/released.h"
#include "bind/request.h"

namespace nb = nanobind;

namespace farandole {
namespace {

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

/// Throws Error (Invalid) if `output` cannot hold the result of an operation on `input`. Does not check a size that
/// only the plan determines.
void require_room(Kind kind, const Captured& output, const Captured& input, std::string_view name) {
  if (output.dtype != input.dtype) throw Error::invalid(std::string(name), "the output differs from the input in type");
  if (output.device != input.device)
    throw Error::invalid(std::string(name), "the output lies on another device than the input");
  if (!traits_of(kind).is_sized_by_plan() && !std::ranges::equal(output.shape, input.shape))
    throw Error::invalid(std::string(name), "the output differs from the input in shape");
  if (!output.writable) throw Error::invalid(std::string(name), "its memory is read-only; pass a writable tensor");
}

/// Waits for operations on a device; returns their handle.
Handle finished(Handle handle) {
  handle.wait();
  return handle;
}

/// Returns whether only their entry holds these operations. Otherwise a thread with a handle may still read a result.
bool are_free(std::span<const OperationPtr> operations) {
  for (const OperationPtr& operation : operations)
    if (operation.use_count() != 2) return false;
  // The other threads have released the operations after their last access.
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

template <class Tensors>
Spans outputs_of(const Tensors& tensors) {
  Spans spans;
  spans.reserve(tensors.size());
  for (const auto& each : tensors)
    if (each.output) spans.emplace_back(each.output->data, each.output->bytes());
  return spans;
}

template <class Tensors>
bool any_on_device(const Tensors& tensors) {
  return std::ranges::any_of(tensors, [](const auto& each) { return each.input.device != nullptr; });
}

}  // namespace

TensorView Calls::Tensors::view() const {
  TensorView view{.input = input.data, .dtype = input.dtype, .shape = input.shape};
  if (output) {
    view.output = output->data;
    view.room = output->bytes();
  }
  return view;
}

StagedTensor Calls::Tensors::staged(std::string_view name) const {
  StagedTensor made;
  made.view = view();
  made.device = input.device;
  made.input_stream = input.stream;
  if (output) made.output_stream = output->stream;
  made.name = name;
  made.keep = keep_alive(input, output ? &*output : nullptr);
  return made;
}

Calls::Tensors Calls::tensors_of(Kind kind, std::string_view name, nb::handle input, nb::handle output) {
  if (!traits_of(kind).has_tensor()) return {};
  Tensors tensors{capture(input, name), std::nullopt};
  if (output.is_none()) {
    if (!traits_of(kind).is_sized_by_plan()) throw Error::invalid(std::string(name), "an output tensor is needed");
    return tensors;
  }
  tensors.output = output.is(input) ? tensors.input.again() : capture(output, name);
  require_room(kind, *tensors.output, tensors.input, name);
  return tensors;
}

std::vector<Calls::Tensors> Calls::members_of(const RequestView& request, nb::handle inputs, nb::handle outputs) {
  // Tuples are read faster, and no other thread can change them.
  const nb::tuple given(inputs), results = outputs.is_none() ? nb::tuple() : nb::tuple(outputs);
  if (results.size() != 0 && results.size() != given.size())
    throw Error::invalid(std::string(request.name), "a group needs one output for each input, or none at all");
  const nb::none none;
  std::vector<Tensors> all;
  all.reserve(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    const nb::handle output = results.size() != 0 ? nb::handle(results[i].ptr()) : nb::handle(none);
    all.push_back(tensors_of(request.kind, request.name, given[i].ptr(), output));
  }
  if (results.size() > 1 && overlap(outputs_of(all)))
    throw Error::invalid(std::string(request.name), "two outputs of the group share memory; pass copies");
  return all;
}

Calls::Entry& Calls::entry_of(const RequestView& request, Entry& once) {
  const KindTraits& traits = traits_of(request.kind);
  const bool recurs = request.cacheable && (request.grouped ? !traits.has_splits : traits.is_kept);
  Kept& kept = request.grouped ? groups_ : singles_;
  auto at = kept.find(request.name);
  if (at == kept.end()) {
    if (!recurs || kept.size() >= capacity_) return once;
    at = kept.try_emplace(std::string(request.name)).first;
  }
  return at->second.busy || !recurs ? once : at->second;
}

/// Returns whether the entry's only operation, which is free, now performs its old request on the tensor.
bool Calls::prepare_again(Entry& entry, const RequestView& request, std::span<const Tensors> tensors) {
  if (tensors.size() != 1 || entry.given.size() != 1 || !are_free(entry.given)) return false;
  try {
    if (!build(entry.given.front(), request, tensors.front().view(), 0, 1, engine_->size())) return true;
  } catch (...) {
    entry.given.clear();  // an invalid request
    throw;
  }
  entry.recurring.arrange();
  return true;
}

void Calls::prepare(Entry& entry, const RequestView& request, std::span<const Tensors> tensors) {
  if (prepare_again(entry, request, tensors)) return;
  // Stored only once valid: an unchanged request is not validated again.
  std::vector<OperationPtr> given = std::move(entry.given);
  entry.given.clear();
  bool changed = given.size() != tensors.size();
  if (changed) {
    given.assign(tensors.size(), nullptr);
  } else if (!are_free(given)) {
    changed = true;
    for (OperationPtr& operation : given) {
      auto next = std::make_shared<Operation>();
      next->request = operation->request;
      operation = std::move(next);
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i)
    changed = build(given[i], request, tensors[i].view(), i, tensors.size(), engine_->size()) || changed;
  if (changed) {
    entry.recurring.operations = given;
    entry.recurring.arrange();
  }
  entry.given = std::move(given);
}

void Calls::start(std::span<const OperationPtr> operations, std::span<const Tensors> tensors, bool wake,
                  const Captured* lasting) {
  try {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Captured& input = lasting != nullptr ? *lasting : tensors[i].input;
      if (input.has_owner()) operations[i]->keep = keep_alive(input, tensors[i].output ? &*tensors[i].output : nullptr);
    }
    engine_->submit(operations, wake);
  } catch (...) {
    for (const OperationPtr& operation : operations) operation->keep.reset();
    throw;
  }
  sweep_references();  // only after submit(), which refuses a forked child: such a child must not take locks
}

std::optional<Handle> Calls::perform(Entry& entry, const RequestView& request, std::span<const Tensors> tensors,
                                     const Captured* lasting) {
  prepare(entry, request, tensors);
  std::optional<Handle> handle;
  if (traits_of(request.kind).is_sized_by_plan() || request.kind == Kind::Join) handle.emplace(engine_, entry.given);
  bool done = false;
  {
    const Busy busy(entry.busy);
    std::optional<Released> released;
    done = engine_->run_in_lane(entry.recurring, [&] { released.emplace(*engine_); });
  }
  if (!done) {
    start(entry.given, tensors, false, lasting);
    // Another thread may use the entry from here on.
    Handle(engine_, entry.given).wait();
    return handle;
  }
  for (const OperationPtr& operation : entry.given)
    if (operation->error) throw Error(*operation->error);
  return handle;
}

Handle Calls::start_staged(const RequestView& request, std::span<const std::string_view> names,
                           std::span<const Tensors> tensors) {
  std::vector<StagedTensor> staged;
  staged.reserve(tensors.size());
  const dlpack::ExchangeApi* api = nullptr;
  bool tells_streams = true;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Captured& result = tensors[i].output ? *tensors[i].output : tensors[i].input;
    if (result.device != nullptr) {
      api = result.api;
      tells_streams = tells_streams && api != nullptr;
    }
    staged.push_back(tensors[i].staged(request.grouped ? std::string_view() : names[i]));
  }
  const std::shared_ptr<Staging> staging = staging_->get();
  // Not within the braces below: GCC 11 destroys no earlier member when a later one's expression throws (GCC PR 66139).
  const std::shared_ptr<StagedCall> call = staging->start(request, staged);
  Handle handle(engine_, {staging, call, tells_streams ? api : nullptr});
  sweep_references();
  return handle;
}

void Calls::wait_for_submissions() {
  const std::shared_ptr<Staging> staging = staging_->used();
  for (bool submitted = staging == nullptr; !submitted;) {
    {
      const Released released(*engine_);
      submitted = staging->wait_for_submissions(kSignalsEvery);
    }
    if (!submitted && PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void Calls::shutdown() {
  closed_ = true;
  decltype(known_)().swap(known_);  // Python's requests may refer to what owns this object
  for (Bound* bound : std::exchange(bound_, {})) bound->release();
  {
    const nb::gil_scoped_release released;
    engine_->shutdown();
  }
  const nb::gil_scoped_release released;
  const std::shared_ptr<Staging> staging = staging_->used();
  if (staging != nullptr) {
    staging->close();
    engine_->devices().close(engine_->is_forked());
  }
  engine_->wait_for_callers();
}

const Calls::Known* Calls::known_of(nb::handle request, nb::handle name) const {
  const auto at = known_.find(request.ptr());
  return at != known_.end() && at->second.name.is(name) ? &at->second : nullptr;
}

Calls::Entry& Calls::learn(nb::handle given, nb::handle name, const RequestView& request, Entry& once) {
  Entry& entry = entry_of(request, once);
  if (&entry == &once || entry.known == given.ptr()) return entry;
  // One request per entry: callers that make a new one for each call must not fill the table.
  known_.erase(std::exchange(entry.known, given.ptr()));
  known_.insert_or_assign(given.ptr(), Known{nb::borrow(given), nb::borrow(name), request, &entry});
  return entry;
}

std::optional<Handle> Calls::perform_one(Entry& entry, const RequestView& request, const Tensors& tensors,
                                         const Captured* lasting) {
  if (tensors.input.device == nullptr) return perform(entry, request, {&tensors, 1}, lasting);
  return finished(start_staged(request, {&request.name, 1}, {&tensors, 1}));
}

std::optional<Handle> Calls::run(nb::handle given, nb::handle name, nb::handle input, nb::handle output) {
  Entry once;
  if (const Known* known = known_of(given, name)) {
    const RequestView request = known->view;  // a copy, because another thread may call shutdown()
    Entry& entry = *known->entry;
    // Before the entry is looked at: reading a tensor may run Python code, and thereby other threads.
    const Tensors tensors = tensors_of(request.kind, request.name, input, output);
    return perform_one(entry.busy ? once : entry, request, tensors);
  }
  const ReadRequest read(given, text_of(name));
  const RequestView& request = read.view();
  // A join must follow all operations that were started before.
  if (request.kind == Kind::Join) wait_for_submissions();
  if (!request.grouped) {
    const Tensors tensors = tensors_of(request.kind, request.name, input, output);
    return perform_one(tensors.input.device != nullptr ? once : learn(given, name, request, once), request, tensors);
  }
  const std::vector<Tensors> tensors = members_of(request, input, output);
  if (tensors.empty()) return std::nullopt;
  if (any_on_device(tensors)) return finished(start_staged(request, {}, tensors));
  return perform(entry_of(request, once), request, tensors);
}

Handle Calls::start_one(Entry& entry, const RequestView& request, const Tensors& tensors, bool wake) {
  if (tensors.input.device != nullptr) return start_staged(request, {&request.name, 1}, {&tensors, 1});
  prepare(entry, request, {&tensors, 1});
  start(entry.given, {&tensors, 1}, wake);
  return {engine_, entry.given};
}

Handle Calls::start(nb::handle given, nb::handle name, nb::handle input, nb::handle output, bool wake) {
  Entry once;
  if (const Known* known = known_of(given, name)) {
    const RequestView request = known->view;  // as in run()
    Entry& entry = *known->entry;
    const Tensors tensors = tensors_of(request.kind, request.name, input, output);
    return start_one(entry.busy ? once : entry, request, tensors, wake);
  }
  const ReadRequest read(given, text_of(name));
  const RequestView& request = read.view();
  if (!request.grouped) {
    const Tensors tensors = tensors_of(request.kind, request.name, input, output);
    return start_one(tensors.input.device != nullptr ? once : learn(given, name, request, once), request, tensors,
                     wake);
  }
  const std::vector<Tensors> tensors = members_of(request, input, output);
  if (tensors.empty()) return {engine_, std::span<const OperationPtr>()};
  if (any_on_device(tensors)) return start_staged(request, {}, tensors);
  Entry& entry = entry_of(request, once);
  prepare(entry, request, tensors);
  start(entry.given, tensors, wake);
  return {engine_, entry.given};
}

Handle Calls::start_transfer(bool sends, nb::handle name, nb::handle tensor, int peer, uint32_t tag) {
  const std::string_view text = text_of(name);
  const Captured captured = capture(tensor, text);
  auto transfer = std::make_shared<Transfer>();
  Request& request = transfer->request;
  request.name = text;
  if (captured.device != nullptr) throw Error::invalid(request.name, "messages are sent from host memory only");
  if (!sends && !captured.writable)
    throw Error::invalid(request.name, "its memory is read-only; pass a writable tensor");
  request.dtype = captured.dtype;
  request.shape.assign(captured.shape.begin(), captured.shape.end());
  transfer->input = captured.data;
  transfer->output = captured.data;
  transfer->peer = peer;
  transfer->tag = tag;
  transfer->sends = sends;
  transfer->keep = keep_alive(captured, nullptr);
  engine_->post(transfer);
  sweep_references();
  const OperationPtr operation = transfer;
  return {engine_, {&operation, 1}};
}

Handle Calls::start_each(RequestView request, nb::handle names, nb::handle inputs, nb::handle outputs, bool wake) {
  request.cacheable = true;  // each operation has its own name
  const nb::tuple named(names), given(inputs), results(outputs);
  const size_t count = named.size();
  if (given.size() != count || results.size() != count)
    throw Error::invalid("", "many operations need one name, one input and one output each");
  std::vector<Tensors> tensors;
  std::vector<std::string_view> each;
  std::vector<OperationPtr> operations;
  tensors.reserve(count);
  each.reserve(count);
  operations.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    each.push_back(text_of(named[i].ptr()));
    tensors.push_back(tensors_of(request.kind, each[i], given[i].ptr(), results[i].ptr()));
  }
  if (any_on_device(tensors)) return start_staged(request, each, tensors);
  for (size_t i = 0; i < count; ++i) {
    request.name = each[i];
    Entry once;
    Entry& entry = entry_of(request, once);
    prepare(entry, request, {&tensors[i], 1});
    operations.push_back(entry.given.front());
  }
  if (count > 0) start(operations, tensors, wake);
  return {engine_, operations};
}

}  // namespace farandole
