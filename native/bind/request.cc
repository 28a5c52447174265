#include "bind/request.h"

#include <nanobind/stl/vector.h>

#include <limits>
#include <string>

#include "base/int8_blocks.h"

namespace nb = nanobind;

namespace farandole {
namespace {

// The fields of Request and Reduction (farandole.core.operations), by index: reading a tuple takes a tenth of the time
// of reading attributes.
enum RequestField { kKind, kName, kReduction, kRoot, kSplits, kGrouped, kRequestFields = 8 };
enum ReductionField { kOp, kPrescale, kPostscale, kReductionFields };

PyObject* require_tuple(PyObject* given, Py_ssize_t fields, const char* type) {
  if (PyTuple_Check(given) && PyTuple_Size(given) == fields) return given;
  PyErr_Format(PyExc_TypeError, "expected a %s, got %s", type, nb::inst_name(given).c_str());
  throw nb::python_error();
}

int int_of(PyObject* given) {
  const long value = PyLong_AsLong(given);
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    PyErr_SetString(PyExc_OverflowError, "a field of a request does not fit into 32 bits");
    throw nb::python_error();
  }
  return static_cast<int>(value);
}

double double_of(PyObject* given) {
  const double value = PyFloat_AsDouble(given);
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

}  // namespace

std::string_view text_of(nb::handle name) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &length);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<size_t>(length)};
}

ReadRequest::ReadRequest(nb::handle request, std::string_view name) {
  PyObject* fields = require_tuple(request.ptr(), kRequestFields, "Request");
  PyObject* reduction = require_tuple(PyTuple_GetItem(fields, kReduction), kReductionFields, "Reduction");
  const int kind = int_of(PyTuple_GetItem(fields, kKind));
  const int op = int_of(PyTuple_GetItem(reduction, kOp));
  if (kind < 0 || kind >= kKinds) throw Error::invalid(std::string(name), "unknown kind of operation");
  if (op < 0 || op >= kReduceOps) throw Error::invalid(std::string(name), "unknown reduce op " + std::to_string(op));
  if (PyObject* splits = PyTuple_GetItem(fields, kSplits); splits != Py_None)
    splits_ = nb::cast<std::vector<int64_t>>(nb::handle(splits));
  view_ = {.name = name,
           .kind = static_cast<Kind>(kind),
           .op = static_cast<ReduceOp>(op),
           .prescale = double_of(PyTuple_GetItem(reduction, kPrescale)),
           .postscale = double_of(PyTuple_GetItem(reduction, kPostscale)),
           .root = int_of(PyTuple_GetItem(fields, kRoot)),
           .splits = splits_,
           .cacheable = PyTuple_GetItem(fields, kName) != Py_None,
           .grouped = PyTuple_GetItem(fields, kGrouped) == Py_True};
}

}  // namespace farandole
