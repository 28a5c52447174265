#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/request.h"

namespace farandole {

/// Settings for tensors on GPUs; the same on all ranks.
struct GpuOptions {
  std::vector<std::string> nccl_files{"libnccl.so.2"};  // the first that opens is used, unless NCCL is loaded already
  std::array<bool, kKinds> through_host{};              // by kind: never use NCCL
  std::array<bool, kKinds> by_nccl{};                   // by kind: fail if NCCL cannot be used
  bool may_share = false;                               // several ranks may use NCCL on one GPU
};

/// A rank's message to the others before the first operation among GPUs.
struct DeviceCard {
  bool is_able = false;                     // the rank has NCCL, and uses a single GPU
  int version = 0;                          // of NCCL
  std::array<char, 16> gpu{};               // its UUID
  std::array<bool, kKinds> through_host{};  // from GpuOptions, like by_nccl
  std::array<bool, kKinds> by_nccl{};
  bool may_share = false;
  std::array<uint64_t, 2> process{};  // differs between processes, also of different hosts
  std::array<char, 256> why_not{};    // why the rank cannot use NCCL, ending with a zero
};

/// The ranks' decision between NCCL and host memory.
struct DeviceDecision {
  std::array<bool, kKinds> through_host{};
  std::array<bool, kKinds> by_nccl{};
  std::string why_not;          // why the ranks cannot use NCCL; empty if they can
  bool is_by_settings = false;  // all ranks' settings exclude NCCL

  /// Returns an error if the settings require NCCL for `request` and the ranks cannot use it.
  [[nodiscard]] std::optional<Error> refusal(const Request& request) const;
  [[nodiscard]] bool uses_nccl(Kind kind) const { return why_not.empty() && !through_host[static_cast<size_t>(kind)]; }
};

/// Returns whether settings send all kinds of operations with tensors through host memory. Pure.
[[nodiscard]] bool excludes_nccl(const std::array<bool, kKinds>& through_host);

/// Decides for NCCL if every rank has its own GPU, or may share it, and all have the same version of NCCL. Pure; the
/// same on all ranks. `cards` is indexed by rank; texts name the job's ranks, see job_rank().
[[nodiscard]] DeviceDecision decide(const std::vector<DeviceCard>& cards, const std::vector<int>& members);

/// Returns whether another rank is a thread of the same process as `rank`. Pure.
[[nodiscard]] bool shares_process(const std::vector<DeviceCard>& cards, int rank);

}  // namespace farandole
