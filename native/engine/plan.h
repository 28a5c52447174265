#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "collectives/knobs.h"
#include "engine/request.h"

namespace farandole {

/// Marks a request that has no number yet.
inline constexpr uint32_t kNoId = 0xffffffff;

/// More numbers than a coordinator ever gives out in one step: a jump beyond is a damaged plan.
inline constexpr uint32_t kMostNumbers = 1 << 24;

/// One operation of a plan, or a run of operations that are only a number: what is the same on all ranks.
struct Entry {
  /// Empty when the number says it all.
  std::string name;
  /// The number that stands for this name and signature, from now on if a name comes with it; or kNoId.
  uint32_t id = kNoId;
  /// Allgather: rows of each rank. Alltoall: rows that rank r sends to rank c, at r * size + c.
  /// Join: the rank that joined last. Else empty.
  std::vector<int64_t> sizes;
  /// With more than one, the entry stands for the numbers from `id` on, in their order.
  uint32_t count = 1;
  /// What the others asked for, when a rank that has joined takes part without having asked.
  std::optional<Request> request = std::nullopt;

  [[nodiscard]] bool is_number() const { return name.empty() && sizes.empty() && id != kNoId; }
  bool operator==(const Entry&) const = default;
};

/// Operations that run as one: a bucket. All entries share kind, dtype (of allreduces), operation, factors and
/// root, and whether joined ranks take part.
struct Bucket {
  Kind kind = Kind::Barrier;
  std::vector<Entry> entries;

  bool operator==(const Bucket&) const = default;
};

/// An operation that cannot run; its ranks raise the error and the job goes on.
struct Refusal {
  std::string name;
  Error error;
};

/// What all ranks do next, in this order. The order of plans and of what they hold is the same on all ranks.
/// Knobs stand first, and only with a bucket: a rank that waits for nothing, and may run an operation that it agrees on
/// with its host alone, has none of them before it.
using Plan = std::vector<std::variant<Bucket, Refusal, Knobs>>;

}  // namespace farandole
