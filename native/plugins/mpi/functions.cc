// The functions of MPI that JAX calls, for MPItrampoline. The other functions end the process: see absent.txt.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "plugins/mpi/abi.h"
#include "plugins/mpi/job.h"

namespace farandole::mpi {
namespace {

thread_local std::string error_text;  // of this thread's last call that failed

Job& job() { return Job::of_process(); }

/// Returns MPI's code for the outcome of `perform`, whose error MPI_Error_string then tells.
template <class Perform>
int code_of(Perform perform) noexcept {
  try {
    perform();
    return kSuccess;
  } catch (const Communicator::Failure& failure) {
    error_text = failure.text;
  } catch (const std::exception& error) {
    error_text = error.what();
  }
  return kFailed;
}

Element required(Datatype type) {
  const std::optional<Element> element = element_of(type);
  if (!element) throw Communicator::Failure{"arrays of this type cannot be sent"};
  return *element;
}

ReduceOp required_op(Op op) {
  const std::optional<ReduceOp> reduction = reduction_of(op);
  if (!reduction) throw Communicator::Failure{"there is no such reduction"};
  return *reduction;
}

const Communicator& of(const Communicator* communicator) {
  return communicator == nullptr ? job().world() : *communicator;
}

size_t positive(int count) { return static_cast<size_t>(std::max(count, 0)); }

}  // namespace
}  // namespace farandole::mpi

using namespace farandole::mpi;  // NOLINT: MPI's names are outside of it

extern "C" {

// MPI_COMM_WORLD is null, because the job starts only after MPItrampoline has read it.
Communicator* MPIABI_COMM_WORLD = nullptr;
intptr_t MPIABI_COMM_NULL = -1;
intptr_t MPIABI_REQUEST_NULL = 0;
void* MPIABI_STATUS_IGNORE = nullptr;
int MPIABI_SUCCESS = kSuccess;
int MPIABI_ERR_OTHER = kFailed;
int MPIABI_UNDEFINED = kUndefined;
int MPIABI_THREAD_SINGLE = 0;
int MPIABI_THREAD_FUNNELED = 1;
int MPIABI_THREAD_SERIALIZED = 2;
int MPIABI_THREAD_MULTIPLE = kThreadMultiple;

using farandole::DType;
using farandole::ReduceOp;
Datatype MPIABI_BYTE = handle_of(DType::UInt8);
Datatype MPIABI_INT8_T = handle_of(DType::Int8);
Datatype MPIABI_INT16_T = handle_of(DType::Int16);
Datatype MPIABI_INT32_T = handle_of(DType::Int32);
Datatype MPIABI_INT64_T = handle_of(DType::Int64);
Datatype MPIABI_UINT8_T = handle_of(DType::UInt8);
Datatype MPIABI_UINT16_T = handle_of(DType::UInt16);
Datatype MPIABI_UINT32_T = handle_of(DType::UInt32);
Datatype MPIABI_UINT64_T = handle_of(DType::UInt64);
Datatype MPIABI_FLOAT = handle_of(DType::Float32);
Datatype MPIABI_DOUBLE = handle_of(DType::Float64);
Datatype MPIABI_C_COMPLEX = handle_of(DType::Float32) | kComplex;
Datatype MPIABI_C_DOUBLE_COMPLEX = handle_of(DType::Float64) | kComplex;
Op MPIABI_SUM = handle_of(ReduceOp::Sum);
Op MPIABI_PROD = handle_of(ReduceOp::Product);
Op MPIABI_MIN = handle_of(ReduceOp::Min);
Op MPIABI_MAX = handle_of(ReduceOp::Max);

int mpiwrapper_version_major = 2;
int mpiwrapper_version_minor = 9;
int mpiwrapper_version_patch = 0;
int mpiabi_version_major = 2;
int mpiabi_version_minor = 9;
int mpiabi_version_patch = 0;
void mpiwrapper_export_fortran_constants_() {}

int MPIABI_Init_thread(int*, char***, int, int* provided) {
  job().start();
  *provided = kThreadMultiple;
  return kSuccess;
}

int MPIABI_Initialized(int* flag) {
  *flag = job().has_started();
  return kSuccess;
}

int MPIABI_Finalized(int* flag) {
  *flag = job().has_ended();
  return kSuccess;
}

// JAX calls it twice: when Python exits, and when XLA's object is deleted.
int MPIABI_Finalize() {
  job().end();
  return kSuccess;
}

// XLA makes no communicator in a thread for which this is false, because of MPI libraries that support one thread only.
int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return kSuccess;
}

int MPIABI_Comm_rank(const Communicator* communicator, int* rank) {
  *rank = of(communicator).rank();
  return kSuccess;
}

int MPIABI_Comm_size(const Communicator* communicator, int* size) {
  *size = of(communicator).size();
  return kSuccess;
}

int MPIABI_Comm_split(const Communicator*, int color, int key, Communicator** made) {
  *made = job().split(color, key).release();
  return kSuccess;
}

int MPIABI_Comm_free(Communicator** communicator) {
  delete *communicator;
  *communicator = nullptr;
  return kSuccess;
}

int MPIABI_Allreduce(const void* input, void* output, int count, Datatype type, Op op,
                     const Communicator* communicator) {
  return code_of([=] { of(communicator).allreduce(input, output, positive(count), required(type), required_op(op)); });
}

int MPIABI_Allgather(const void* input, int count, Datatype type, void* output, int, Datatype,
                     const Communicator* communicator) {
  return code_of([=] { of(communicator).allgather(input, output, positive(count), required(type)); });
}

int MPIABI_Reduce_scatter(const void* input, void* output, const int* counts, Datatype type, Op op,
                          const Communicator* communicator) {
  return code_of([=] {
    const Communicator& among = of(communicator);
    if (std::adjacent_find(counts, counts + among.size(), std::not_equal_to<>()) != counts + among.size())
      throw Communicator::Failure{"the parts of a reduce-scatter must be equal"};
    among.reduce_scatter(input, output, positive(counts[0]), required(type), required_op(op));
  });
}

int MPIABI_Isend(const void* data, int count, Datatype type, int peer, int, const Communicator* communicator,
                 void** request) {
  return code_of([=] {
    *request = of(communicator).post(true, const_cast<void*>(data), positive(count) * required(type).bytes(), peer);
  });
}

int MPIABI_Irecv(void* data, int count, Datatype type, int peer, int, const Communicator* communicator,
                 void** request) {
  return code_of(
      [=] { *request = of(communicator).post(false, data, positive(count) * required(type).bytes(), peer); });
}

int MPIABI_Wait(void** request, void*) {
  return code_of([=] {
    if (*request != nullptr) Communicator::finish(job().table(), std::exchange(*request, nullptr));
  });
}

int MPIABI_Waitall(int count, void** requests, void*) {
  int code = kSuccess;
  for (int i = 0; i < count; ++i) code = std::max(code, MPIABI_Wait(&requests[i], nullptr));
  return code;
}

int MPIABI_Sendrecv(const void* input, int sent, Datatype sent_type, int to, int tag, void* output, int received,
                    Datatype received_type, int from, int, const Communicator* communicator, void*) {
  void* requests[2] = {nullptr, nullptr};
  int code = MPIABI_Irecv(output, received, received_type, from, tag, communicator, &requests[0]);
  if (code == kSuccess) code = MPIABI_Isend(input, sent, sent_type, to, tag, communicator, &requests[1]);
  return std::max(code, MPIABI_Waitall(2, requests, nullptr));
}

int MPIABI_Error_string(int, char* text, int* length) {
  const size_t bytes = std::min(error_text.size(), kMaxErrorText - 1);
  std::memcpy(text, error_text.data(), bytes);
  text[bytes] = '\0';
  *length = static_cast<int>(bytes);
  return kSuccess;
}

int MPIABI_Get_library_version(char* text, int* length) {
  *length = std::snprintf(text, kMaxErrorText, "farandole");
  return kSuccess;
}

int MPIABI_Get_version(int* version, int* subversion) {
  *version = 3;
  *subversion = 1;
  return kSuccess;
}

int MPIXABI_Query_cuda_support() { return 0; }
int MPIXABI_Query_hip_support() { return 0; }
int MPIXABI_Query_ze_support() { return 0; }

/// All functions that JAX does not call end here.
[[noreturn]] void farandole_mpi_absent(const char* name) {
  std::fprintf(stderr,
               "farandole: this process called %s, but only JAX's collectives are served where MPITRAMPOLINE_LIB "
               "names farandole's library; unset MPITRAMPOLINE_LIB, or --as-gloo\n",
               name);
  std::abort();
}

// Called by farandole.jax.collectives.

/// Returns null, or an error text.
const char* farandole_mpi_serve(const void* table, int32_t rank_id, int32_t size, Hooks hooks) {
  const auto& given = *static_cast<const farandole::plugins::CoreTable*>(table);
  if (given.version != farandole::plugins::kTableVersion) return "it is not of the same build as the core";
  job().serve(given, rank_id, size, hooks);
  return nullptr;
}

void farandole_mpi_fail(const char* text) { job().fail(text); }

}  // extern "C"
