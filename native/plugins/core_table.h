#pragma once

#include <cstddef>
#include <cstdint>

/// What plugins for frameworks may ask of the core: C functions and plain structs, so that a plugin is built against
/// this file alone and there is one engine per rank in a process, whoever asks it.
namespace farandole::plugins {

inline constexpr uint32_t kTableVersion = 1;

/// One tensor of a request. Input and output must stay until `done` is called.
struct Tensor {
  const void* input;
  void* output;   // null where only the plan sizes the result: then `allocate` is asked
  int32_t dtype;  // DType
  int32_t dims;
  const int64_t* shape;
};

/// One operation, or a group of them of which none begins before all are ready on all ranks.
struct Request {
  int32_t slot;         // whose, see Slot
  int32_t process_set;  // its number; 0: all ranks
  int32_t kind;         // Kind
  int32_t op;           // ReduceOp
  int32_t root;         // place in the process set
  bool grouped;
  bool cacheable;  // the name will come again
  double prescale;
  double postscale;
  const char* name;  // ends with '.': a number is added, of requests of that name
  const int64_t* splits;
  size_t splits_count;  // 0: even shares
  const Tensor* tensors;
  size_t count;
};

/// No rank of that slot, or no such process set, has been started, or it is shut down.
inline constexpr int32_t kNotInitialized = 100;

/// How it ended. Pointers are valid during the call only.
struct Outcome {
  int32_t error;            // ErrorKind, kNotInitialized, or -1: it went well
  const char* text;         // of the error
  const int64_t* received;  // alltoall: rows from each rank
  size_t received_count;
  int32_t last_joined;
};

/// What hears of it. Neither may throw.
struct Listener {
  /// Called once, by any thread, perhaps before submit() returns; holding no lock of the core's, so it may ask again.
  void (*done)(void* cookie, const Outcome* outcome) noexcept;
  /// Returns memory for the result of the member `index`, null when there is none. Must not ask for anything.
  void* (*allocate)(void* cookie, size_t index, const int64_t* shape, int32_t dims, size_t bytes) noexcept;
  void* cookie;
};

/// Where a rank is.
struct Place {
  int32_t rank, size;  // in the process set; rank -1: no member
  int32_t local_rank, local_size;
};

struct CoreTable {
  uint32_t version;
  /// Starts it; never blocks, never throws. Whatever happens is told to the listener.
  void (*submit)(const Request* request, const Listener* listener) noexcept;
  /// Returns 0, or kNotInitialized.
  int32_t (*find)(int32_t slot, int32_t process_set, Place* place) noexcept;
};

}  // namespace farandole::plugins
