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
/// Which file is loaded, and MPI's start and end, are decided by src/farandole/bootstrap/mpi_library.py and mpi.py,
/// which call MPI by ctypes. Ranks also meet by MPI where another fabric carries their tensors; that must work before
/// an engine exists, with the deadlines and messages of init(). Only the dlopen() handle comes from there to here,
/// because the engine's threads call MPI without the interpreter.
///
/// There are three ABIs. Open MPI's handles are addresses of its variables, those of the standard ABI (MPI 5) are small
/// numbers as pointers, and those of MPICH (also Intel MPI, MVAPICH and Cray MPI) are ints. All fit `Handle`; an int
/// lies in its low half, so a `Handle` that the library writes must be 0 before.
class MpiLibrary {
 public:
  using Handle = intptr_t;
  using Operator = void(void* in, void* in_out, int* count, Handle* dtype);

  /// Returns the library that dlopen() has returned as `loaded`, one object per process. Throws Error (Invalid) if a
  /// function is missing.
  static MpiLibrary& of(void* loaded);

  /// Returns the datatype of numbers of this size and sign; halves are bytes to MPI, two each.
  [[nodiscard]] Handle type_of(DType dtype) const { return types_[static_cast<size_t>(dtype)]; }
  /// Returns MPI's operator for Sum, Product, Min or Max.
  [[nodiscard]] Handle operator_of(ReduceOp op) const;
  /// Returns an operator that calls `function`; it is made once per `slot` and freed by MPI_Finalize.
  [[nodiscard]] Handle own_operator(size_t slot, Operator* function);
  /// Returns the text for an error code, "MPI_Test failed: ...".
  [[nodiscard]] std::string text_of(const char* function, int code) const;

  static constexpr size_t kOwnOperators = 16;

  const char* abi = "";
  Handle world = 0;
  Handle errors_return = 0;
  void* in_place = nullptr;
  void* ignored_status = nullptr;
  int thread_multiple = 0;
  bool is_slow_in_place = false;  // MPI_Iallreduce in place takes a slower algorithm than with two buffers

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
  int (*ibarrier)(Handle, Handle*);
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
