#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/pinned_pool.h"
#include "engine/operation.h"
#include "transport/guard.h"

namespace farandole {

/// Copies of operations in device memory, on which the engine works instead, for the length of one run.
class HostCopies {
 public:
  /// Copies the inputs to pinned memory, and waits for that. Throws what the guard throws, or Error (Fabric).
  HostCopies(PinnedPool& pool, std::span<const OperationPtr> operations, int rank, Guard& guard);
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  /// Starts the copies of the results to the device, where the caller has given memory for them.
  void return_results();

 private:
  struct Moved {
    Operation* operation;
    const std::byte* input;
    std::byte* output;
  };
  void move(Operation& operation, PinnedPool& pool, int rank);

  std::vector<Moved> moved_;
};

}  // namespace farandole
