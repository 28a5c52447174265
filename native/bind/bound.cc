#include "bind/bound.h"

#include <exception>
#include <utility>

#include "bind/errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace farandole {
namespace {

/// The call of Python. A slot instead of a method: looking up a method takes longer than a reduction of a few bytes.
PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_Size(arguments) != 0 || (keywords != nullptr && PyDict_Size(keywords) != 0)) {
    PyErr_SetString(PyExc_TypeError, "a bound allreduce takes no arguments");
    return nullptr;
  }
  if (!nb::inst_ready(self)) {
    PyErr_SetString(PyExc_TypeError, "this bound allreduce was not initialized");
    return nullptr;
  }
  try {
    return nb::inst_ptr<Bound>(self)->reduce().release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (...) {
    try {
      translate(std::current_exception(), nullptr);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  }
  return nullptr;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Bound>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Bound>(self)->clear();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(call)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {0, nullptr}};

/// A reference of Python's, without nanobind's check of the GIL, which takes as long as a step of a reduction.
class Reference {
 public:
  explicit Reference(PyObject* object) : object_(object) { Py_INCREF(object_); }
  ~Reference() { Py_DECREF(object_); }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;

 private:
  PyObject* object_;
};

nb::object list_of(nb::handle tensor) {
  nb::list list;
  list.append(tensor);
  return list;
}

}  // namespace

Bound::Bound(nb::object find, nb::object changed, nb::object request, nb::str name, nb::object tensor)
    : find_(std::move(find)),
      tensor_(std::move(tensor)),
      changed_(std::move(changed)),
      request_(std::move(request)),
      name_(std::move(name)),
      changed_argument_(list_of(tensor_)),
      read_(request_, text_of(name_)) {
  const std::string_view text = read_.view().name;
  kept_ = capture_lasting(tensor_, text);
  if (const Captured captured = memory(); !captured.writable)
    throw Error::invalid(std::string(text), "its memory is read-only; pass a writable tensor");
}

Bound::~Bound() { detach(); }

void Bound::detach() {
  if (calls_ != nullptr) calls_->forget(*this);
  calls_ = nullptr;
}

void Bound::release() {
  calls_ = nullptr;
  engine_.reset();
}

void Bound::attach() {
  nb::object engine = find_();
  Calls* calls = nb::cast<Calls*>(engine);
  detach();  // only now: `find_` may have run other threads
  calls->remember(*this);
  calls_ = calls;
  stale_ = true;
  engine_ = std::move(engine);
}

Captured Bound::memory() const { return kept_ ? kept_->again() : capture(tensor_, read_.view().name); }

nb::object Bound::reduce() {
  if (!changed_.is_none()) changed_(changed_argument_);
  Captured captured = memory();
  if (calls_ == nullptr || calls_->is_closed()) attach();
  if (stale_ && !entry_.busy) {
    entry_ = {};
    stale_ = false;
  }
  Calls::Tensors tensors{std::move(captured), std::nullopt};
  tensors.output = tensors.input.again();
  const Captured* lasting = kept_ ? &*kept_ : nullptr;
  const Reference engine(engine_.ptr());  // another thread may release it
  Calls& calls = *calls_;
  if (entry_.busy || stale_) {
    Calls::Entry once;
    calls.perform_one(once, read_.view(), tensors, lasting);
  } else {
    calls.perform_one(entry_, read_.view(), tensors, lasting);
  }
  return tensor_;
}

int Bound::traverse(visitproc visit, void* arg) const {
  for (const nb::object* each : {&find_, &tensor_, &changed_, &request_, &name_, &changed_argument_, &engine_})
    Py_VISIT(each->ptr());
  if (kept_) Py_VISIT(kept_->owner.ptr());
  return 0;
}

void Bound::clear() {
  detach();
  release();
  kept_.reset();
  for (nb::object* each : {&find_, &tensor_, &changed_, &changed_argument_}) each->reset();
}

void define_bound(nb::module_& m) {
  nb::class_<Bound>(m, "Bound", nb::type_slots(slots))
      .def(nb::init<nb::object, nb::object, nb::object, nb::str, nb::object>(), "find"_a, "changed"_a.none(),
           "request"_a, "name"_a, "tensor"_a,
           nb::sig("def __init__(self, find: collections.abc.Callable[[], Engine], "
                   "changed: collections.abc.Callable[[list[Any]], object] | None, "
                   "request: farandole.core.operations.request.Request, name: str, tensor: Any) -> None"));
}

}  // namespace farandole
