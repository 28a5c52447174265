#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/shared_staging.h"
#include "plugins/core_table.h"

namespace farandole::plugins {

struct Ranks;

/// The engines of one rank of this process. Plugins find them by a number, because traced graphs outlive engines. The
/// number is the least free one, so it is the same after shutdown and a new start.
class RankEngines {
 public:
  RankEngines(int32_t local_rank, int32_t local_size);
  ~RankEngines() { close(); }
  RankEngines(const RankEngines&) = delete;
  RankEngines& operator=(const RankEngines&) = delete;

  [[nodiscard]] int32_t number() const { return number_; }

  /// Sends requests of the process set that was made with `set_ranks` to `engine` from now on, and those on device
  /// memory to `staging`. Null pointers mean that this rank is not a member. Returns the set's address, by which
  /// requests name it: 0 without `set_ranks`, for the set of all ranks. Within a process an address belongs to one list
  /// of ranks for ever, so a graph that was traced for one set never runs over another one, unlike with the sets'
  /// numbers.
  int32_t add(const std::vector<int32_t>& set_ranks, std::shared_ptr<Engine> engine,
              std::shared_ptr<SharedStaging> staging);
  void remove(int32_t address);

  /// Frees the number. Idempotent.
  void close();

 private:
  Ranks& ranks_;
  int32_t number_ = 0;
  bool open_ = true;
};

/// The table for plugins; lives as long as the process.
[[nodiscard]] const CoreTable& core_table();

}  // namespace farandole::plugins
