#pragma once

#include <cstdint>
#include <memory>

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

  /// Sends requests of the process set to `engine` from now on, and those on device memory to `staging`. Null pointers
  /// mean that this rank is not a member.
  void add(int32_t process_set, std::shared_ptr<Engine> engine, std::shared_ptr<SharedStaging> staging);
  void remove(int32_t process_set);

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
