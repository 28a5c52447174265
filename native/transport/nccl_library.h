#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/reduce.h"
#include "device/cuda_library.h"

namespace farandole {

/// The functions of NCCL (libnccl.so.2), opened at run time and called without its headers.
///
/// A process must use only one NCCL, so a library that a framework has loaded takes precedence.
class NcclLibrary {
 public:
  struct CommObject;
  using Comm = CommObject*;
  using Stream = CudaLibrary::Stream;
  using UniqueId = std::array<char, 128>;  // by value, as NCCL's struct of 128 bytes

  /// The first fields of NCCL's configuration, those of 2.18. Later versions treat their further fields as not set.
  struct Config {
    static constexpr int kNotSet = INT32_MIN;

    size_t size = sizeof(Config);
    uint32_t magic = 0xcafebeef;
    uint32_t version = kOldest;
    int blocking = 0;  // calls return at once, so that a lost rank ends the wait
    int cga_cluster_size = kNotSet;
    int min_ctas = kNotSet;
    int max_ctas = kNotSet;
    const char* net_name = nullptr;
    int split_share = kNotSet;
  };

  static constexpr int kImmediate = 1;  // ncclScalarHostImmediate: a factor in host memory, read by the call
  static constexpr int kSuccess = 0;
  static constexpr int kInProgress = 7;
  static constexpr int kOldest = 21800;  // NCCL 2.18

  /// Opens NCCL: the library that the process has loaded, else the first of `files` that can be loaded. Throws Error
  /// (Invalid), whose reason says what to install, if there is none or it is too old.
  explicit NcclLibrary(const std::vector<std::string>& files);
  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  [[nodiscard]] static int type_of(DType dtype);
  /// Returns NCCL's number for Sum, Product, Min, Max or Average.
  [[nodiscard]] static int operator_of(ReduceOp op);
  /// Returns the text of an error: "ncclCommInitRankConfig failed: unhandled cuda error (1): CUDA driver version is
  /// ...".
  [[nodiscard]] std::string text_of(const char* function, int code, Comm comm) const;
  [[nodiscard]] int version() const { return version_; }  // 22705 for NCCL 2.27.5

  int (*get_unique_id)(UniqueId* id);
  int (*comm_init_rank_config)(Comm* comm, int ranks, UniqueId id, int rank, Config* config);
  int (*comm_get_async_error)(Comm comm, int* code);
  int (*comm_abort)(Comm comm);
  int (*comm_finalize)(Comm comm);
  int (*comm_destroy)(Comm comm);
  int (*group_start)();
  int (*group_end)();
  int (*all_reduce)(const void* in, void* out, size_t count, int type, int op, Comm comm, Stream stream);
  int (*broadcast)(const void* in, void* out, size_t count, int type, int root, Comm comm, Stream stream);
  int (*all_gather)(const void* in, void* out, size_t count, int type, Comm comm, Stream stream);
  int (*reduce_scatter)(const void* in, void* out, size_t count, int type, int op, Comm comm, Stream stream);
  int (*reduce)(const void* in, void* out, size_t count, int type, int op, int root, Comm comm, Stream stream);
  int (*send)(const void* in, size_t count, int type, int peer, Comm comm, Stream stream);
  int (*recv)(void* out, size_t count, int type, int peer, Comm comm, Stream stream);
  int (*red_op_create_pre_mul_sum)(int* op, void* factor, int type, int residence, Comm comm);
  int (*red_op_destroy)(int op, Comm comm);

 private:
  void find_functions(void* loaded, const std::string& file);

  int version_ = 0;
  const char* (*get_error_string_)(int code) = nullptr;
  const char* (*get_last_error_)(Comm comm) = nullptr;
};

}  // namespace farandole
