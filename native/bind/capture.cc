#include "bind/capture.h"

#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "bind/dlpack.h"

namespace nb = nanobind;

namespace farandole {
namespace {

/// References given up by threads that may not hold the GIL; whoever holds it next drops them.
class Graveyard {
 public:
  void bury(PyObject* object) {
    const std::lock_guard lock(mu_);
    dead_.push_back(object);
  }
  void sweep() {
    std::vector<PyObject*> dead;
    {
      const std::lock_guard lock(mu_);
      if (dead_.empty()) return;
      dead.swap(dead_);
    }
    for (PyObject* object : dead) Py_DECREF(object);
  }

 private:
  std::mutex mu_;
  std::vector<PyObject*> dead_;
};

Graveyard& graveyard() {
  // Never destroyed: threads may still bury while the process exits.
  static auto* instance = new Graveyard;
  return *instance;
}

std::shared_ptr<void> own(nb::handle object) {
  Py_INCREF(object.ptr());
  return {object.ptr(), [](void* held) { graveyard().bury(static_cast<PyObject*>(held)); }};
}

std::string spell_type(nb::handle object) { return nb::cast<std::string>(nb::type_name(object.type())); }

DType dtype_of(dlpack::DataType type, const std::string& name) {
  const auto is = [&](dlpack::Code code, int bits) {
    return type.lanes == 1 && type.code == code && type.bits == bits;
  };
  if (is(dlpack::kFloat, 32)) return DType::Float32;
  if (is(dlpack::kFloat, 16)) return DType::Float16;
  if (is(dlpack::kBfloat, 16)) return DType::BFloat16;
  if (is(dlpack::kFloat, 64)) return DType::Float64;
  if (is(dlpack::kInt, 64)) return DType::Int64;
  if (is(dlpack::kInt, 32)) return DType::Int32;
  if (is(dlpack::kInt, 16)) return DType::Int16;
  if (is(dlpack::kInt, 8)) return DType::Int8;
  if (is(dlpack::kUInt, 8)) return DType::UInt8;
  if (is(dlpack::kUInt, 16)) return DType::UInt16;
  if (is(dlpack::kUInt, 32)) return DType::UInt32;
  if (is(dlpack::kUInt, 64)) return DType::UInt64;
  if (is(dlpack::kBool, 8)) return DType::Bool;
  throw Error::invalid(
      name, "its element type (DLPack code " + std::to_string(type.code) + ", " + std::to_string(type.bits) +
                " bits) is not supported; use bool, an integer of 8 to 64 bits, float16, bfloat16, float32 or float64");
}

DType dtype_of(const Py_buffer& view, const std::string& name) {
  const std::string format = view.format == nullptr ? "B" : view.format;
  const char code = format.empty() ? '\0' : format.back();
  const bool native =
      format.size() == 1 || (format.size() == 2 && (format[0] == '<' || format[0] == '=' || format[0] == '@'));
  if (native) {
    switch (code) {
      case '?': return DType::Bool;
      case 'e': return DType::Float16;
      case 'f': return DType::Float32;
      case 'd': return DType::Float64;
      case 'b':
      case 'h':
      case 'i':
      case 'l':
      case 'q':
        switch (view.itemsize) {
          case 1: return DType::Int8;
          case 2: return DType::Int16;
          case 4: return DType::Int32;
          case 8: return DType::Int64;
        }
        break;
      case 'B':
      case 'H':
      case 'I':
      case 'L':
      case 'Q':
        switch (view.itemsize) {
          case 1: return DType::UInt8;
          case 2: return DType::UInt16;
          case 4: return DType::UInt32;
          case 8: return DType::UInt64;
        }
        break;
      default: break;
    }
  }
  throw Error::invalid(name,
                       "its element type (buffer format '" + format +
                           "') is not supported; use bool, an integer of 8 to 64 bits, float16, float32 or float64");
}

[[noreturn]] void refuse_strides(const std::string& name) {
  throw Error::invalid(
      name,
      "Tensor is required to be contiguous. Pass a C-contiguous copy (tensor.contiguous(), numpy.ascontiguousarray)");
}

Captured from_dlpack(const dlpack::Tensor& tensor, const std::string& name) {
  if (tensor.device.type != dlpack::kCpu && tensor.device.type != dlpack::kCpuPinned)
    throw Error::invalid(name, "it lies on a device (DLPack type " + std::to_string(tensor.device.type) +
                                   "), and this version reduces in CPU memory only; pass tensor.cpu()");
  Captured captured;
  captured.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  captured.dtype = dtype_of(tensor.dtype, name);
  captured.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  int64_t expected = 1;
  bool contiguous = true;
  for (int32_t dim = tensor.ndim - 1; dim >= 0 && tensor.strides != nullptr; --dim) {
    contiguous = contiguous && (tensor.shape[dim] == 1 || tensor.strides[dim] == expected);
    expected *= tensor.shape[dim];
  }
  if (!contiguous && expected != 0) refuse_strides(name);  // without elements there is nothing to stride over
  return captured;
}

/// The exchange interface of a type, or null; looked up once per type.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  static auto* known = new std::unordered_map<PyTypeObject*, const dlpack::ExchangeApi*>;  // under the GIL
  if (const auto found = known->find(type); found != known->end()) return found->second;
  const dlpack::ExchangeApi* api = nullptr;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();  // no such interface: the other two ways remain
  } else {
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
      api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (api != nullptr && (api->version.major != 1 || api->tensor_from_object == nullptr)) api = nullptr;
  }
  Py_INCREF(type);  // its address must stay its own
  known->emplace(type, api);
  return api;
}

Captured capture_buffer(nb::handle tensor, const std::string& name) {
  // The view itself is what the operation owns: while it lives, nobody can resize the memory away.
  const nb::object held = nb::steal(PyMemoryView_FromObject(tensor.ptr()));
  if (!held.is_valid()) throw nb::python_error();
  const Py_buffer& view = *PyMemoryView_GET_BUFFER(held.ptr());
  Captured captured;
  captured.dtype = dtype_of(view, name);
  if (PyBuffer_IsContiguous(&view, 'C') == 0) refuse_strides(name);
  captured.data = static_cast<std::byte*>(view.buf);
  captured.shape.assign(view.shape, view.shape + view.ndim);
  captured.writable = view.readonly == 0;
  captured.owner = own(held);
  return captured;
}

Captured capture_dlpack(nb::handle tensor, const std::string& name) {
  const nb::object capsule = tensor.attr("__dlpack__")();
  const auto* managed = static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw nb::python_error();
  Captured captured = from_dlpack(managed->tensor, name);
  captured.owner = own(capsule);  // the capsule's destructor calls the producer's deleter
  return captured;
}

}  // namespace

Captured capture(nb::handle tensor, const std::string& name) {
  if (const auto* api = exchange_api(Py_TYPE(tensor.ptr())); api != nullptr) {
    dlpack::Tensor view{};
    if (api->tensor_from_object(tensor.ptr(), &view) != 0) throw nb::python_error();
    Captured captured = from_dlpack(view, name);
    captured.owner = own(tensor);
    return captured;
  }
  if (PyObject_CheckBuffer(tensor.ptr()) != 0) return capture_buffer(tensor, name);
  if (nb::hasattr(tensor, "__dlpack__")) return capture_dlpack(tensor, name);
  throw Error::invalid(name, "a " + spell_type(tensor) +
                                 " is no tensor; pass one with DLPack or the buffer protocol (torch, numpy, ...)");
}

void sweep_references() { graveyard().sweep(); }

}  // namespace farandole
