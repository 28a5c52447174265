// The functions of MPI that JAX calls for `psum`, handed to Open MPI 4 or 5, for MPItrampoline: see native/plugins/mpi.
// Built without mpi.h, which hosts with Open MPI's library often lack: its handles are addresses of variables.
#include <stdio.h>
#include <stdlib.h>

int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 9, mpiwrapper_version_patch = 0;
int mpiabi_version_major = 2, mpiabi_version_minor = 9, mpiabi_version_patch = 0;
void mpiwrapper_export_fortran_constants_(void) {}

int MPIABI_SUCCESS = 0, MPIABI_ERR_OTHER = 16, MPIABI_UNDEFINED = -32766;
int MPIABI_THREAD_SINGLE = 0, MPIABI_THREAD_FUNNELED = 1, MPIABI_THREAD_SERIALIZED = 2, MPIABI_THREAD_MULTIPLE = 3;
void* MPIABI_STATUS_IGNORE = 0;

#define HANDLE(name, variable) \
  extern char variable[];      \
  void* MPIABI_##name = variable
HANDLE(COMM_WORLD, ompi_mpi_comm_world);
HANDLE(COMM_NULL, ompi_mpi_comm_null);
HANDLE(FLOAT, ompi_mpi_float);
HANDLE(SUM, ompi_mpi_op_sum);

int MPI_Init_thread(int*, char***, int, int*);
int MPI_Finalized(int*);
int MPI_Finalize(void);
int MPI_Comm_rank(void*, int*);
int MPI_Comm_size(void*, int*);
int MPI_Comm_split(void*, int, int, void**);
int MPI_Allreduce(const void*, void*, int, void*, void*, void*);
int MPI_Error_string(int, char*, int*);
int MPI_Get_library_version(char*, int*);

int MPIABI_Init_thread(int* count, char*** words, int wanted, int* provided) {
  return MPI_Init_thread(count, words, 3, provided);  // XLA calls it by threads of its own
}
int MPIABI_Finalized(int* flag) { return MPI_Finalized(flag); }
int MPIABI_Finalize(void) {  // JAX calls it twice
  int done = 0;
  MPI_Finalized(&done);
  return done ? 0 : MPI_Finalize();
}
int MPIABI_Is_thread_main(int* flag) { return *flag = 1, 0; }
int MPIABI_Comm_rank(void* comm, int* rank) { return MPI_Comm_rank(comm, rank); }
int MPIABI_Comm_size(void* comm, int* size) { return MPI_Comm_size(comm, size); }
int MPIABI_Comm_split(void* comm, int color, int key, void** made) { return MPI_Comm_split(comm, color, key, made); }
int MPIABI_Comm_free(void** comm) { return (void)comm, 0; }  // JAX calls it after MPI_Finalize
int MPIABI_Allreduce(const void* in, void* out, int count, void* type, void* op, void* comm) {
  return MPI_Allreduce(in, out, count, type, op, comm);
}
int MPIABI_Error_string(int code, char* text, int* length) { return MPI_Error_string(code, text, length); }
int MPIABI_Get_library_version(char* text, int* length) { return MPI_Get_library_version(text, length); }
int MPIXABI_Query_cuda_support(void) { return 0; }
int MPIXABI_Query_hip_support(void) { return 0; }
int MPIXABI_Query_ze_support(void) { return 0; }
void absent(const char* name) {
  fprintf(stderr, "this wrapper for measurements has no %s\n", name);
  abort();
}
