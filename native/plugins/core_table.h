#pragma once

#include <cstddef>
#include <cstdint>

/// The core's interface for plugins of frameworks: C functions and plain structs. A plugin is built against this file
/// alone, and all plugins of a process share one engine per rank.
namespace farandole::plugins {

inline constexpr uint32_t kTableVersion = 3;

/// One tensor of a request. Input and output must live until `done` is called.
struct Tensor {
  const void* input;
  void* output;   // null if the plan determines the size of the result: then `allocate` is called
  size_t room;    // bytes at `output`
  int32_t dtype;  // DType
  int32_t dims;
  const int64_t* shape;
};

/// One operation, or a group of operations, none of which begins before all are ready on all ranks.
struct Request {
  int32_t rank_id;      // see RankEngines
  int32_t process_set;  // the set's address, see RankEngines; 0: all ranks
  int32_t kind;         // Kind
  int32_t op;           // ReduceOp
  int32_t root;         // index in the process set
  bool grouped;
  bool cacheable;  // the name will recur
  double prescale;
  double postscale;
  const char* name;  // if it ends with '.', a count of its requests is appended
  const int64_t* splits;
  size_t splits_count;  // 0: equal shares
  const Tensor* tensors;
  size_t count;
};

/// Error code: the rank or process set was not started, or is shut down.
inline constexpr int32_t kNotInitialized = 100;

/// The end of a request. Pointers are valid during the call only.
struct Outcome {
  int32_t error;            // ErrorKind, kNotInitialized, or -1 for success
  const char* text;         // of the error
  const int64_t* received;  // alltoall: rows from each rank
  size_t received_count;
  int32_t last_joined;
};

/// The callbacks of a request. They must not throw.
struct Listener {
  /// Called once, by any thread, perhaps before submit() returns. The thread holds no lock of the core, so this
  /// function may submit again.
  void (*done)(void* cookie, const Outcome* outcome) noexcept;
  /// Returns memory for the result of the member `index`, or null. Must not submit.
  void* (*allocate)(void* cookie, size_t index, const int64_t* shape, int32_t dims, size_t bytes) noexcept;
  void* cookie;
};

/// Bytes for another rank of the job, or from it. They must live until `finish` returns.
struct Message {
  int32_t rank_id;
  bool sends;
  int32_t peer;
  uint32_t tag;
  void* data;  // only read by a send
  size_t bytes;
  const char* name;
};

/// Rank and local rank, with their sizes.
struct Place {
  int32_t rank, size;  // in the process set; rank -1: not a member
  int32_t local_rank, local_size;
};

struct CoreTable {
  uint32_t version;
  /// Starts the request; never blocks, never throws. The listener gets the outcome.
  void (*submit)(const Request* request, const Listener* listener) noexcept;
  /// Runs a request of at most one tensor, with an output of the result's size. The calling thread drives the engine
  /// meanwhile, which is faster than its own thread. Blocks; never throws. Reports the outcome to the listener before
  /// it returns, and does not call `allocate`.
  void (*run)(const Request* request, const Listener* listener) noexcept;
  /// Starts to send or receive, in an engine with links for messages. Returns what `finish` takes; null if it has
  /// reported an error to the listener. Blocks for no peer.
  void* (*post)(const Message* message, const Listener* listener) noexcept;
  /// Blocks until a posted message is complete, reports its outcome, and frees it.
  void (*finish)(void* posted, const Listener* listener) noexcept;
  /// Runs a request on tensors in memory of the CUDA device of `stream`, each with an output. The operation waits for
  /// the work that is in `stream` now, and later work in `stream` waits for the results. Blocks until all ranks take
  /// part; never throws. Reports the outcome to the listener before it returns, and does not call `allocate`.
  void (*run_on_device)(const Request* request, void* stream, const Listener* listener) noexcept;
  /// Returns 0, or kNotInitialized.
  int32_t (*find)(int32_t rank_id, int32_t process_set, Place* place) noexcept;
};

}  // namespace farandole::plugins
