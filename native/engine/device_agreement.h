#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/request.h"

namespace farandole {

/// How tensors on GPUs are to be treated; alike on all ranks.
struct GpuOptions {
  std::vector<std::string> nccl_files{"libnccl.so.2"};  // opened unless the process has loaded one
  std::array<bool, kKinds> through_host{};              // by kind: NCCL must not be used
  std::array<bool, kKinds> by_nccl{};                   // by kind: an error if NCCL cannot be used
};

/// A rank's message to the others before the first operation among GPUs.
struct DeviceCard {
  bool is_able = false;                     // it has NCCL, and one GPU
  int version = 0;                          // of NCCL
  std::array<char, 16> gpu{};               // its number in all processes
  std::array<bool, kKinds> through_host{};  // of its options, as the next
  std::array<bool, kKinds> by_nccl{};
  std::array<uint64_t, 2> process{};
  std::array<char, 256> why_not{};  // text that ends with a zero
};

/// The ranks' decision between NCCL and host memory.
struct DeviceDecision {
  std::array<bool, kKinds> through_host{};
  std::array<bool, kKinds> by_nccl{};
  std::string why_not;  // empty: NCCL

  /// Returns the error of an operation that must go by NCCL and cannot.
  [[nodiscard]] std::optional<Error> refusal(const Request& request) const;
  [[nodiscard]] bool uses_nccl(Kind kind) const { return why_not.empty() && !through_host[static_cast<size_t>(kind)]; }
};

/// Decides on NCCL if every rank has a GPU of its own and the same NCCL. Pure; the same on all ranks. `cards` by rank.
[[nodiscard]] DeviceDecision decide(const std::vector<DeviceCard>& cards);

/// Returns whether another rank is a thread of the same process as `rank`. Pure.
[[nodiscard]] bool shares_process(const std::vector<DeviceCard>& cards, int rank);

}  // namespace farandole
