#pragma once

#include <memory>
#include <vector>

#include "collectives/fabric.h"
#include "transport/mpi_mesh.h"

namespace farandole {

/// MPI as the fabric of an engine.
class MpiFabric final : public Fabric {
 public:
  /// Creates the communicator; blocks and throws as the constructor of `MpiComm` does.
  MpiFabric(void* loaded, const std::vector<int>& ranks) : comm_(std::make_shared<MpiComm>(loaded, ranks)) {}

  [[nodiscard]] int rank() const override { return comm_->rank(); }
  [[nodiscard]] int size() const override { return comm_->size(); }
  [[nodiscard]] std::unique_ptr<World> make_world(Guard& guard, WaitPolicy policy, bool direct) const override;

 private:
  std::shared_ptr<MpiComm> comm_;
};

}  // namespace farandole
