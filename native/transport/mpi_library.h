#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/dtype.h"
#include "base/reduce.h"

namespace farandole {

/// The functions and constants of an MPI library that the process has loaded, without its headers.
///
/// Python chooses and loads the library (src/farandole/meeting/launched/mpi_library.py), and starts and ends MPI by
/// ctypes (mpi.py): the rendezvous may use MPI before an engine exists, even if another fabric carries the tensors,
/// with the deadlines and messages of init(). This class gets only the dlopen() handle, because the engine's threads
/// call MPI without the interpreter.
///
/// There are three ABIs. Handles of Open MPI are addresses of its variables. Handles of the standard ABI (MPI 5) are
/// small numbers of pointer size. Handles of MPICH (also Intel MPI, MVAPICH and Cray MPI) are ints. `Handle` holds all
/// three. The library writes an int handle into the low half only, so initialize a `Handle` with 0 before such a call.
class MpiLibrary {
 public:
  using Handle = intptr_t;
  using Operator = void(void* in, void* in_out, int* count, Handle* dtype);

  /// Returns the object for `loaded`, a handle of dlopen(); one object per handle and process. Throws Error (Invalid)
  /// if a function is missing.
  static MpiLibrary& of(void* loaded);

  /// Returns MPI's datatype for elements of this size and sign. MPI has no 16-bit floats; they are sent as uint16.
  [[nodiscard]] Handle type_of(DType dtype) const { return types_[static_cast<size_t>(dtype)]; }
  /// Returns MPI's operator for Sum, Product, Min or Max.
  [[nodiscard]] Handle operator_of(ReduceOp op) const;
  /// Returns an operator that calls `function`. It is created once per `slot`, and MPI_Finalize frees it.
  [[nodiscard]] Handle own_operator(size_t slot, Operator* function);
  /// Returns the text for an error code, "MPI_Test failed: ...".
  [[nodiscard]] std::string text_of(const char* function, int code) const;

  static constexpr size_t kOwnOperators = 16;

  Handle world = 0;
  Handle errors_return = 0;
  void* in_place = nullptr;
  void* ignored_status = nullptr;
  int thread_multiple = 0;
  bool is_slow_in_place = false;  // MPI_Iallreduce uses a slower algorithm in place than with two buffers

  int (*finalized)(int*);
  int (*query_thread)(int*);
  int (*comm_rank)(Handle, int*);
  int (*comm_size)(Handle, int*);
  int (*comm_group)(Handle, Handle*);
  int (*group_incl)(Handle, int, const int*, Handle*);
  int (*group_free)(Handle*);
  int (*comm_create_group)(Handle, Handle, int, Handle*);
  int (*comm_set_errhandler)(Handle, Handle);
  int (*comm_free)(Handle*);
  int (*op_create)(Operator*, int, Handle*);
  int (*error_string)(int, char*, int*);
  int (*test)(Handle*, int*, void*);
  int (*iallreduce)(const void*, void*, int, Handle, Handle, Handle, Handle*);
  int (*iallgatherv)(const void*, int, Handle, void*, const int*, const int*, Handle, Handle, Handle*);
  int (*ibcast)(void*, int, Handle, int, Handle, Handle*);
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);

 private:
  explicit MpiLibrary(void* loaded);
  void find_functions(void* loaded);
  void use_open_mpi(void* loaded);
  void use_standard_abi();
  void use_mpich();

  std::array<Handle, kDTypes> types_{};
  std::array<Handle, 4> operators_{};  // of Min, Max, Sum, Product
  std::mutex mu_;                      // guards own_operators_
  std::array<Handle, kOwnOperators> own_operators_{};
};

}  // namespace farandole
