#include "bind/capture.h"

#include <nanobind/stl/string.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind/dlpack.h"

namespace nb = nanobind;

namespace farandole {
namespace {

/// References dropped by threads that may not hold the GIL; the next thread with the GIL releases them.
class DroppedReferences {
 public:
  void add(PyObject* object) {
    const std::lock_guard lock(mu_);
    dead_.push_back(object);
    occupied_.store(true, std::memory_order_relaxed);
  }
  void sweep() {
    // References queued at this moment are found the next time.
    if (!occupied_.load(std::memory_order_relaxed)) return;
    std::vector<PyObject*> dead;
    {
      const std::lock_guard lock(mu_);
      dead.swap(dead_);
      occupied_.store(false, std::memory_order_relaxed);
    }
    for (PyObject* object : dead) Py_DECREF(object);
  }

 private:
  std::atomic<bool> occupied_{false};
  std::mutex mu_;
  std::vector<PyObject*> dead_;
};

DroppedReferences& dropped_references() {
  // Never destroyed: threads may still queue references while the process exits.
  static auto* instance = new DroppedReferences;
  return *instance;
}

/// Owner of references to one or two objects.
class Held {
 public:
  Held(nb::object first, nb::object second) : first_(first.release().ptr()), second_(second.release().ptr()) {}
  ~Held() {
    dropped_references().add(first_);
    if (second_ != nullptr) dropped_references().add(second_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  PyObject* first_;
  PyObject* second_;
};

std::string spell_type(nb::handle object) { return nb::cast<std::string>(nb::type_name(object.type())); }

DType dtype_of(dlpack::DataType type, std::string_view name) {
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
  if (is(dlpack::kBool, 8) || is(dlpack::kUInt, 1)) return DType::Bool;  // 1 bit: MXNet's bool, which takes a byte
  throw Error::invalid(
      std::string(name),
      "its element type (DLPack code " + std::to_string(type.code) + ", " + std::to_string(type.bits) +
          " bits) is not supported; use bool, an integer of 8 to 64 bits, float16, bfloat16, float32 or float64");
}

DType dtype_of(const Py_buffer& view, std::string_view name) {
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
  throw Error::invalid(std::string(name),
                       "its element type (buffer format '" + format +
                           "') is not supported; use bool, an integer of 8 to 64 bits, float16, float32 or float64");
}

[[noreturn]] void refuse_strides(std::string_view name) {
  throw Error::invalid(
      std::string(name),
      "Tensor is required to be contiguous. Pass a C-contiguous copy (tensor.contiguous(), numpy.ascontiguousarray)");
}

[[noreturn]] void refuse_without_memory(std::string_view name) {
  throw Error::invalid(std::string(name),
                       "the tensor has no memory of its own, as a DTensor or a FakeTensor; pass a plain tensor "
                       "(tensor.to_local())");
}

/// Returns the device of a tensor, null for host memory.
CudaDevice* device_of(const dlpack::Tensor& tensor, std::string_view name) {
  switch (tensor.device.type) {
    case dlpack::kCpu:
    case dlpack::kCpuPinned: return nullptr;
    case dlpack::kCuda:
    case dlpack::kCudaManaged: break;
    default:
      throw Error::invalid(std::string(name), "it lies on a device (DLPack type " + std::to_string(tensor.device.type) +
                                                  ") that is neither a CPU nor a GPU of CUDA; copy it to the CPU");
  }
  try {
    return &CudaDevice::of(tensor.device.id);
  } catch (const Error& error) {
    throw error.named(std::string(name));
  }
}

Captured from_dlpack(const dlpack::Tensor& tensor, std::string_view name) {
  Captured captured;
  captured.device = device_of(tensor, name);
  captured.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  captured.dtype = dtype_of(tensor.dtype, name);
  captured.shape = {tensor.shape, static_cast<size_t>(tensor.ndim)};
  int64_t expected = 1;
  bool contiguous = true;
  for (int32_t dim = tensor.ndim - 1; dim >= 0 && tensor.strides != nullptr; --dim) {
    contiguous = contiguous && (tensor.shape[dim] == 1 || tensor.strides[dim] == expected);
    expected *= tensor.shape[dim];
  }
  if (!contiguous && expected != 0) refuse_strides(name);  // without elements strides do not matter
  if (tensor.data == nullptr && captured.bytes() != 0) refuse_without_memory(name);
  return captured;
}

/// How to read the memory of tensors of one type.
struct Access {
  const dlpack::ExchangeApi* api;  // used if not null, because it is the fastest
  bool buffer;                     // otherwise: use the buffer protocol instead of `__dlpack__`
};

/// Return whether to use the buffer protocol for tensors of `type`. Not for JAX's arrays: theirs is read-only and lacks
/// bfloat16. They are read by DLPack, and only callers that own an array without other users may write to it.
bool lends_buffer(PyTypeObject* type) {
  return PyType_GetSlot(type, Py_bf_getbuffer) != nullptr &&
         PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), "unsafe_buffer_pointer") == 0;
}

/// Returns how to read tensors of `type`; looks it up once per type.
const Access& access_of(PyTypeObject* type) {
  static auto* known = new std::unordered_map<PyTypeObject*, Access>;  // under the GIL
  if (const auto found = known->find(type); found != known->end()) return found->second;
  const dlpack::ExchangeApi* api = nullptr;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();  // no such interface: use one of the other two
  } else {
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
      api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (api != nullptr && (api->version.major != 1 || api->tensor_from_object == nullptr)) api = nullptr;
  }
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // its address must stay unique
  return known->emplace(type, Access{api, lends_buffer(type)}).first->second;
}

/// Returns the buffer of a memoryview. Its pointers are valid while the memoryview lives.
Py_buffer buffer_of(PyObject* memoryview) {
#ifdef Py_LIMITED_API
  // The stable ABI has no PyMemoryView_GET_BUFFER. A second buffer has the same pointers, also after its release.
  Py_buffer second;
  if (PyObject_GetBuffer(memoryview, &second, PyBUF_FULL_RO) != 0) throw nb::python_error();
  const Py_buffer seen = second;
  PyBuffer_Release(&second);
  return seen;
#else
  return *PyMemoryView_GET_BUFFER(memoryview);
#endif
}

/// Returns a view of the object. While it lives, the memory cannot be resized.
nb::object view_of(PyObject* exporter) {
  nb::object view = nb::steal(PyMemoryView_FromObject(exporter));
  if (!view.is_valid()) throw nb::python_error();
  return view;
}

/// Returns a reference that keeps the memory alive.
nb::object owner_of(const Captured& captured) {
  return captured.owner.is_valid() ? captured.owner : view_of(captured.buffer.view().obj);
}

Captured capture_view(const Py_buffer& view, std::string_view name) {
  Captured captured;
  captured.dtype = dtype_of(view, name);
  if (PyBuffer_IsContiguous(&view, 'C') == 0) refuse_strides(name);
  captured.data = static_cast<std::byte*>(view.buf);
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  captured.shape = {reinterpret_cast<const int64_t*>(view.shape), static_cast<size_t>(view.ndim)};
  captured.writable = view.readonly == 0;
  return captured;
}

/// Returns the memory of an object with the buffer protocol, held by a memoryview.
Captured capture_by_memoryview(nb::handle tensor, std::string_view name) {
  nb::object held = view_of(tensor.ptr());
  Captured captured = capture_view(buffer_of(held.ptr()), name);
  captured.owner = std::move(held);
  return captured;
}

Captured capture_buffer(nb::handle tensor, std::string_view name) {
  LentBuffer lent(tensor);
  if (lent.holds_shape()) return capture_by_memoryview(tensor, name);
  Captured captured = capture_view(lent.view(), name);
  captured.buffer = std::move(lent);
  return captured;
}

const dlpack::Tensor& tensor_in(const nb::object& capsule) {
  const auto* managed = static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw nb::python_error();
  return managed->tensor;
}

/// The method of MXNet's arrays that makes a capsule; it waits until the array is computed.
constexpr const char* kBeforeDlpack = "to_dlpack_for_read";

Captured capture_dlpack(nb::handle tensor, std::string_view name) {
  nb::object capsule = tensor.attr(nb::hasattr(tensor, "__dlpack__") ? "__dlpack__" : kBeforeDlpack)();
  Captured captured = from_dlpack(tensor_in(capsule), name);
  if (captured.device != nullptr) {
    // The producer makes the given stream wait for its work. A call without a stream is cheap on the CPU.
    CudaDevice& device = *captured.device;
    capsule = tensor.attr("__dlpack__")(nb::arg("stream") = reinterpret_cast<uintptr_t>(device.handover()));
    captured = from_dlpack(tensor_in(capsule), name);
    captured.stream = device.handover();
  }
  captured.owner = capsule;  // the capsule's destructor calls the producer's deleter
  return captured;
}

}  // namespace

LentBuffer::LentBuffer(nb::handle exporter, int flags) {
  if (PyObject_GetBuffer(exporter.ptr(), &view_, flags) != 0) throw nb::python_error();
}

LentBuffer::~LentBuffer() {
  if (view_.obj != nullptr) PyBuffer_Release(&view_);
}

Captured Captured::again() const {
  Captured same;
  same.data = data;
  same.dtype = dtype;
  same.shape = shape;
  same.writable = writable;
  same.device = device;
  same.stream = stream;
  same.api = api;
  return same;
}

size_t Captured::bytes() const {
  size_t count = size_of(dtype);
  for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
  return count;
}

Captured capture(nb::handle tensor, std::string_view name) {
  const Access& access = access_of(Py_TYPE(tensor.ptr()));
  if (access.api != nullptr) {
    dlpack::Tensor view{};
    if (access.api->tensor_from_object(tensor.ptr(), &view) != 0) throw nb::python_error();
    Captured captured = from_dlpack(view, name);
    captured.owner = nb::borrow(tensor);
    if (captured.device == nullptr) return captured;
    if (access.api->current_stream != nullptr) {
      captured.api = access.api;
      captured.stream = current_stream(*access.api, *captured.device);
      return captured;
    }
    return capture_dlpack(tensor, name);
  }
  if (access.buffer) return capture_buffer(tensor, name);
  if (nb::hasattr(tensor, "__dlpack__") || nb::hasattr(tensor, kBeforeDlpack)) return capture_dlpack(tensor, name);
  throw Error::invalid(
      std::string(name),
      "a " + spell_type(tensor) + " is no tensor; pass one with DLPack or the buffer protocol (torch, numpy, ...)");
}

std::optional<Captured> capture_lasting(nb::handle tensor, std::string_view name) {
  const Access& access = access_of(Py_TYPE(tensor.ptr()));
  if (access.api != nullptr || !access.buffer) return std::nullopt;
  return capture_by_memoryview(tensor, name);
}

CudaDevice::Stream current_stream(const dlpack::ExchangeApi& api, const CudaDevice& device) {
  void* stream = nullptr;
  if (api.current_stream(dlpack::kCuda, device.ordinal(), &stream) != 0) throw nb::python_error();
  return static_cast<CudaDevice::Stream>(stream);
}

std::shared_ptr<void> keep_alive(const Captured& input, const Captured* output) {
  const bool another = output != nullptr && output->has_owner();
  return std::make_shared<Held>(owner_of(input), another ? owner_of(*output) : nb::object());
}

void sweep_references() { dropped_references().sweep(); }

}  // namespace farandole
