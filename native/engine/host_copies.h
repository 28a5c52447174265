#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/pinned_pool.h"
#include "engine/operation.h"
#include "transport/guard.h"

namespace farandole {

/// Host copies of operations in device memory, for one run. The operations use the copies while this object lives.
class HostCopies {
 public:
  /// Copies the inputs to pinned memory, and blocks until they are there. Throws what the guard throws, or Error
  /// (Fabric).
  HostCopies(PinnedPool& pool, std::span<const OperationPtr> operations, int rank, Guard& guard);
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  /// Starts to copy the results to the device if the caller has given memory for them.
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
