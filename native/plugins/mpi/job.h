#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plugins/mpi/communicator.h"

namespace farandole::mpi {

/// Functions of `farandole.jax.collectives`, which may be called by any thread.
struct Hooks {
  /// Forms the communicators of the processes that call it with equal `color`, ordered by `key`. Blocks until all
  /// processes of the job have called. Writes the job's numbers of the members of this process's communicator to
  /// `ranks`, which has room for all processes, and their number to `count`. Returns the number of a process set, or -1
  /// after a call of farandole_mpi_fail.
  int32_t (*split)(int32_t color, int32_t key, int32_t* ranks, int32_t* count);
  /// Leaves the job.
  void (*end)();
};

/// This process's part in the job of JAX's processes.
class Job {
 public:
  /// The one object of this process.
  static Job& of_process();

  /// Has Python start the job, if it has not; blocks until all processes have. If that fails, so do the communicators.
  void start();
  void end();
  [[nodiscard]] bool has_started() const { return started_; }
  [[nodiscard]] bool has_ended() const { return ended_; }

  /// Returns a communicator; it always returns one, because XLA ignores this function's errors.
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key);

  // Python calls these during start(), split() and end().
  void serve(const plugins::CoreTable& table, int32_t rank_id, int32_t size, const Hooks& hooks);
  void fail(std::string text) { failure_ = std::move(text); }

  [[nodiscard]] const plugins::CoreTable& table() const { return *table_; }
  [[nodiscard]] const Communicator& world() const { return *world_; }

 private:
  const plugins::CoreTable* table_ = nullptr;
  int32_t rank_id_ = 0;
  Hooks hooks_{};
  std::unique_ptr<Communicator> world_ = std::make_unique<Communicator>("farandole has not started in this process");
  uint32_t splits_ = 0;
  bool started_ = false;
  bool ended_ = false;
  static thread_local std::string failure_;  // what Python has told this thread
};

}  // namespace farandole::mpi
