#include "transport/nccl_library.h"

#include <dlfcn.h>

#include "base/error.h"

namespace farandole {
namespace {

constexpr const char* kFile = "libnccl.so.2";

constexpr const char* kUpdate = "update the framework that brings it, or the package nvidia-nccl";

[[noreturn]] void refuse(const std::string& problem) { throw Error::invalid("", problem); }

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

template <class Function>
void find(void* loaded, const std::string& file, const char* name, Function*& function) {
  void* found = ::dlsym(loaded, name);
  if (found == nullptr)
    refuse(file + " has no " + name + ", and NCCL " + version_text(NcclLibrary::kOldest) + " or later is needed; " +
           kUpdate);
  function = reinterpret_cast<Function*>(found);
}

}  // namespace

NcclLibrary::NcclLibrary(const std::vector<std::string>& files) {
  // Never closed, because NCCL has threads.
  std::string file = kFile;
  void* loaded = ::dlopen(kFile, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  std::string problems;
  for (size_t i = 0; loaded == nullptr && i < files.size(); ++i) {
    file = files[i];
    loaded = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (loaded == nullptr) problems += std::string(problems.empty() ? "" : "; ") + ::dlerror();
  }
  if (loaded == nullptr) refuse("NCCL cannot be loaded; install the package nvidia-nccl (" + problems + ")");
  find_functions(loaded, file);
  int (*get_version)(int*) = nullptr;
  find(loaded, file, "ncclGetVersion", get_version);
  if (const int code = get_version(&version_); code != kSuccess) refuse(text_of("ncclGetVersion", code, nullptr));
  if (version_ < kOldest)
    refuse(file + " is NCCL " + version_text(version_) + ", and " + version_text(kOldest) + " or later is needed; " +
           kUpdate);
}

void NcclLibrary::find_functions(void* loaded, const std::string& file) {
  find(loaded, file, "ncclGetErrorString", get_error_string_);
  find(loaded, file, "ncclGetLastError", get_last_error_);
  find(loaded, file, "ncclGetUniqueId", get_unique_id);
  find(loaded, file, "ncclCommInitRankConfig", comm_init_rank_config);
  find(loaded, file, "ncclCommGetAsyncError", comm_get_async_error);
  find(loaded, file, "ncclCommAbort", comm_abort);
  find(loaded, file, "ncclCommFinalize", comm_finalize);
  find(loaded, file, "ncclCommDestroy", comm_destroy);
  find(loaded, file, "ncclGroupStart", group_start);
  find(loaded, file, "ncclGroupEnd", group_end);
  find(loaded, file, "ncclAllReduce", all_reduce);
  find(loaded, file, "ncclBroadcast", broadcast);
  find(loaded, file, "ncclAllGather", all_gather);
  find(loaded, file, "ncclReduceScatter", reduce_scatter);
  find(loaded, file, "ncclReduce", reduce);
  find(loaded, file, "ncclSend", send);
  find(loaded, file, "ncclRecv", recv);
  find(loaded, file, "ncclRedOpCreatePreMulSum", red_op_create_pre_mul_sum);
  find(loaded, file, "ncclRedOpDestroy", red_op_destroy);
}

int NcclLibrary::type_of(DType dtype) {
  // NCCL has no bool and no 16-bit integers. They are moved as bytes.
  switch (dtype) {
    case DType::Int8: return 0;
    case DType::UInt8:
    case DType::Bool:
    case DType::Int16:
    case DType::UInt16: return 1;
    case DType::Int32: return 2;
    case DType::UInt32: return 3;
    case DType::Int64: return 4;
    case DType::UInt64: return 5;
    case DType::Float16: return 6;
    case DType::Float32: return 7;
    case DType::Float64: return 8;
    case DType::BFloat16: return 9;
  }
  throw Error::internal("an unknown type for NCCL");
}

int NcclLibrary::operator_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Product: return 1;
    case ReduceOp::Max: return 2;
    case ReduceOp::Min: return 3;
    case ReduceOp::Average: return 4;
    default: return 0;
  }
}

std::string NcclLibrary::text_of(const char* function, int code, Comm comm) const {
  std::string text = std::string(function) + " failed: " + get_error_string_(code) + " (" + std::to_string(code) + ")";
  const char* last = get_last_error_(comm);
  if (last != nullptr && *last != '\0') text += std::string(": ") + last;
  return text;
}

}  // namespace farandole
