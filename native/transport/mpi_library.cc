#include "transport/mpi_library.h"

#include <dlfcn.h>

#include <bit>
#include <map>
#include <memory>

#include "base/error.h"

namespace farandole {
namespace {

static_assert(std::endian::native == std::endian::little, "an int handle lies in the low half of a Handle");

using Handle = MpiLibrary::Handle;

constexpr int kLongestText = 8192;  // more than MPI_MAX_ERROR_STRING of any library

void* symbol(void* loaded, const char* name) {
  void* found = ::dlsym(loaded, name);
  if (found == nullptr)
    throw Error::invalid("mpi_library", std::string("the library has no ") + name +
                                            "; MPI 3.0 or later is needed. Set FARANDOLE_MPI_LIBRARY to another file");
  return found;
}

template <class Function>
void find(void* loaded, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(symbol(loaded, name));
}

/// Returns whether the library has the standard ABI. MPICH 5 also exports the function from its library with the old
/// ABI, where the version is -1.
bool is_standard_abi(void* loaded) {
  void* found = ::dlsym(loaded, "MPI_Abi_get_version");
  if (found == nullptr) return false;
  int major = -1;
  int minor = -1;
  reinterpret_cast<int (*)(int*, int*)>(found)(&major, &minor);
  return major >= 1;
}

}  // namespace

MpiLibrary& MpiLibrary::of(void* loaded) {
  // Never destroyed: threads and operators outlive the interpreter's modules.
  static std::mutex mu;
  static auto* libraries = new std::map<void*, std::unique_ptr<MpiLibrary>>();
  const std::lock_guard lock(mu);
  std::unique_ptr<MpiLibrary>& library = (*libraries)[loaded];
  if (library == nullptr) library.reset(new MpiLibrary(loaded));
  return *library;
}

MpiLibrary::MpiLibrary(void* loaded) {
  find_functions(loaded);
  // Check for Open MPI first: it also exports names of the others.
  if (::dlsym(loaded, "ompi_mpi_comm_world") != nullptr) use_open_mpi(loaded);
  else if (is_standard_abi(loaded)) use_standard_abi();
  else use_mpich();
}

void MpiLibrary::find_functions(void* loaded) {
  find(loaded, "MPI_Finalized", finalized);
  find(loaded, "MPI_Query_thread", query_thread);
  find(loaded, "MPI_Comm_rank", comm_rank);
  find(loaded, "MPI_Comm_size", comm_size);
  find(loaded, "MPI_Comm_group", comm_group);
  find(loaded, "MPI_Group_incl", group_incl);
  find(loaded, "MPI_Group_free", group_free);
  find(loaded, "MPI_Comm_create_group", comm_create_group);
  find(loaded, "MPI_Comm_set_errhandler", comm_set_errhandler);
  find(loaded, "MPI_Comm_free", comm_free);
  find(loaded, "MPI_Op_create", op_create);
  find(loaded, "MPI_Error_string", error_string);
  find(loaded, "MPI_Test", test);
  find(loaded, "MPI_Iallreduce", iallreduce);
  find(loaded, "MPI_Iallgatherv", iallgatherv);
  find(loaded, "MPI_Ibcast", ibcast);
  find(loaded, "MPI_Isend", isend);
  find(loaded, "MPI_Irecv", irecv);
}

// The order of types is DType's: uint8, int8, int32, int64, float16, bfloat16, float32, float64, bool, int16, uint16,
// uint32, uint64. MPI has no 16-bit floats: they are sent, and passed to our operators, as uint16.

void MpiLibrary::use_open_mpi(void* loaded) {
  const auto address = [loaded](const char* name) { return reinterpret_cast<Handle>(symbol(loaded, name)); };
  world = address("ompi_mpi_comm_world");
  errors_return = address("ompi_mpi_errors_return");
  in_place = reinterpret_cast<void*>(1);
  ignored_status = nullptr;
  thread_multiple = 3;
  is_slow_in_place = true;  // up to three times at 64 MiB (4.1.4, two ranks)
  const Handle u8 = address("ompi_mpi_uint8_t");
  const Handle u16 = address("ompi_mpi_uint16_t");
  types_ = {u8,
            address("ompi_mpi_int8_t"),
            address("ompi_mpi_int32_t"),
            address("ompi_mpi_int64_t"),
            u16,
            u16,
            address("ompi_mpi_float"),
            address("ompi_mpi_double"),
            u8,
            address("ompi_mpi_int16_t"),
            u16,
            address("ompi_mpi_uint32_t"),
            address("ompi_mpi_uint64_t")};
  operators_ = {address("ompi_mpi_op_min"), address("ompi_mpi_op_max"), address("ompi_mpi_op_sum"),
                address("ompi_mpi_op_prod")};
}

void MpiLibrary::use_standard_abi() {
  world = 0x101;
  errors_return = 0x143;
  in_place = reinterpret_cast<void*>(1);
  ignored_status = nullptr;
  thread_multiple = 4096;
  types_ = {0x241, 0x240, 0x250, 0x258, 0x249, 0x249, 0x210, 0x214, 0x241, 0x248, 0x249, 0x251, 0x259};
  operators_ = {0x22, 0x23, 0x21, 0x24};
}

void MpiLibrary::use_mpich() {
  world = 0x44000000;
  errors_return = 0x54000001;
  in_place = reinterpret_cast<void*>(-1);
  ignored_status = reinterpret_cast<void*>(1);
  thread_multiple = 3;
  types_ = {0x4c00013b, 0x4c000137, 0x4c000439, 0x4c00083a, 0x4c00023c, 0x4c00023c, 0x4c00040a,
            0x4c00080b, 0x4c00013b, 0x4c000238, 0x4c00023c, 0x4c00043d, 0x4c00083e};
  operators_ = {0x58000002, 0x58000001, 0x58000003, 0x58000004};
}

Handle MpiLibrary::operator_of(ReduceOp op) const {
  switch (op) {
    case ReduceOp::Min: return operators_[0];
    case ReduceOp::Max: return operators_[1];
    case ReduceOp::Product: return operators_[3];
    default: return operators_[2];
  }
}

Handle MpiLibrary::own_operator(size_t slot, Operator* function) {
  const std::lock_guard lock(mu_);
  Handle& made = own_operators_[slot];
  if (made == 0)
    if (const int code = op_create(function, 1, &made); code != 0) {
      made = 0;
      throw Error::fabric("", text_of("MPI_Op_create", code));
    }
  return made;
}

std::string MpiLibrary::text_of(const char* function, int code) const {
  std::string text(kLongestText, '\0');
  int length = 0;
  if (error_string(code, text.data(), &length) != 0 || length <= 0) text = "code " + std::to_string(code);
  else text.resize(static_cast<size_t>(length));
  return std::string(function) + " failed: " + text;
}

}  // namespace farandole
