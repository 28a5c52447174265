#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"
#include "plugins/core_table.h"

namespace farandole::plugins {

struct Ranks;

/// One rank of this process as plugins know it: by a number, because what a framework has traced outlives engines. The
/// number is the least that is free, so that after shutdown and a new start it is the same one.
class Slot {
 public:
  Slot(int32_t local_rank, int32_t local_size);
  ~Slot() { close(); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  [[nodiscard]] int32_t number() const { return number_; }

  /// From now on what is asked of the process set goes to `engine`; null: this rank is no member of it.
  void add(int32_t process_set, std::shared_ptr<Engine> engine);
  void remove(int32_t process_set);

  /// Gives the number up. Idempotent.
  void close();

 private:
  Ranks& ranks_;
  int32_t number_ = 0;
  bool open_ = true;
};

/// What plugins are handed; lives as long as the process.
[[nodiscard]] const CoreTable& core_table();

}  // namespace farandole::plugins
