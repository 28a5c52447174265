#include "bind/errors.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "base/error.h"

namespace nb = nanobind;

namespace farandole {
namespace {

nb::object instance_of(const Error& error) {
  const nb::module_ errors = nb::module_::import_("farandole.errors");
  switch (error.kind) {
    case ErrorKind::Invalid: return errors.attr("InvalidRequest")(error.name, error.reason);
    case ErrorKind::Mismatch: return errors.attr("MismatchError")(error.name, error.asked, error.what_differs);
    case ErrorKind::Timeout:
      return errors.attr("CollectiveTimeout")(error.name, nb::tuple(nb::cast(error.ranks)), error.waited);
    case ErrorKind::PeerLost: return errors.attr("PeerLost")(error.name, error.rank, error.reason);
    case ErrorKind::Joined: return errors.attr("JoinedError")(error.name, error.reason);
    case ErrorKind::Fabric: return errors.attr("FabricError")(error.name, error.reason);
    case ErrorKind::Closed: return errors.attr("EngineClosed")(error.reason);
    case ErrorKind::Internal: break;
  }
  return nb::steal(PyObject_CallFunction(PyExc_RuntimeError, "s", error.what()));
}

/// The one translator of native errors to Python's: `farandole.errors` has a class per kind.
nb::object python_error(const Error& error) {
  nb::object instance = instance_of(error);
  if (!error.process_set.empty()) instance.attr("process_set") = error.process_set;
  return instance;
}

}  // namespace

void translate(const std::exception_ptr& raised, void*) {
  try {
    std::rethrow_exception(raised);
  } catch (const Error& error) {
    const nb::object instance = python_error(error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(instance.ptr())), instance.ptr());
  } catch (const std::system_error& error) {
    // The system has refused memory, a thread or a file. The caller knows its purpose.
    const nb::object fields = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, fields.ptr());
  }
}

}  // namespace farandole
