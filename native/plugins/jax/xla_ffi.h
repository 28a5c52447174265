#pragma once

#include <cstddef>
#include <cstdint>

/// The part of XLA's foreign function interface that is used here. It is a C interface whose structs only grow at their
/// ends. This is version 0.1, which every XLA since jaxlib 0.4.35 accepts. Layouts: xla/ffi/api/c_api.h, shipped with
/// jaxlib.
namespace farandole::xla {

struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};
inline constexpr int32_t kMetadata = 1;

/// The start of all arguments of functions, and of most structs.
struct Head {
  size_t struct_size;
  Extension* extension = nullptr;
};

struct Version {
  Head head;
  int32_t major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Error;
struct Future;

enum class Code : int32_t {
  InvalidArgument = 3,
  DeadlineExceeded = 4,
  FailedPrecondition = 9,
  Aborted = 10,
  Internal = 13
};

struct ErrorCreate {
  Head head;
  const char* message;
  Code code;
};

struct FutureCreate {
  Head head;
  Future* future;  // out
};

struct FutureSetAvailable {
  Head head;
  Future* future;
};

struct FutureSetError {
  Head head;
  Future* future;
  Error* error;  // XLA owns it from then on
};

struct StreamGet {
  Head head;
  void* context;  // of the call frame
  void* stream;   // out: CUDA's
};

struct Buffer {
  Head head;
  int32_t dtype;
  void* data;
  int64_t rank;
  const int64_t* dims;
};

/// Arguments and results.
struct Buffers {
  Head head;
  int64_t size;
  const int32_t* types;
  Buffer** buffers;
};

struct Bytes {
  const char* data;
  size_t size;
};

struct Array {
  int32_t dtype;
  size_t size;
  const void* data;
};

struct Attributes {
  Head head;
  int64_t size;
  const int32_t* types;
  Bytes** names;
  void** values;
};
inline constexpr int32_t kArray = 1;
inline constexpr int32_t kString = 4;

using Unused = void*;

struct Api {
  Head head;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorCreate*);
  Unused after_error[3];
  Error* (*get_stream)(StreamGet*);
  Unused between[8];
  Error* (*create_future)(FutureCreate*);
  Error* (*set_available)(FutureSetAvailable*);
  Error* (*set_error)(FutureSetError*);
};

struct CallFrame {
  Head head;
  const Api* api;
  void* context;
  int32_t stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
  Future* future;  // out
};
inline constexpr int32_t kExecute = 3;

}  // namespace farandole::xla
