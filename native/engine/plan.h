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

/// More numbers than a coordinator assigns in one step. A larger jump means a damaged plan.
inline constexpr uint32_t kMostNumbers = 1 << 24;

/// One operation of a plan, or a run of operations given by number only. The fields are the same on all ranks.
struct Entry {
  /// Empty if the number suffices.
  std::string name;
  /// The number of this name and signature, or kNoId. With a name, the number is new.
  uint32_t id = kNoId;
  /// Allgather: rows of each rank. Alltoall: rows that rank r sends to rank c, at r * size + c. Join: the rank that
  /// joined last. Otherwise empty.
  std::vector<int64_t> sizes;
  /// If above one, the entry stands for the numbers from `id` on.
  uint32_t count = 1;
  /// The others' request, if a joined rank takes part.
  std::optional<Request> request = std::nullopt;
  /// The result, if the requests have carried the inputs; see carried.h. The number suffices then.
  Bytes result{};

  [[nodiscard]] bool is_number() const { return name.empty() && sizes.empty() && result.empty() && id != kNoId; }
  bool operator==(const Entry&) const = default;
};

/// Operations that run as one. All entries share kind, dtype (of allreduces), operation, factors and root, whether
/// joined ranks take part, whether their tensors are on GPUs, and whether they hold results.
struct Bucket {
  Kind kind = Kind::Barrier;
  std::vector<Entry> entries;

  /// Returns the entry of the operation `index`. Without sizes all entries are alike, and one may stand for several.
  [[nodiscard]] const Entry& entry_of(size_t index) const { return entries[traits_of(kind).is_ragged ? index : 0]; }
  bool operator==(const Bucket&) const = default;
};

/// An operation that cannot run; its ranks raise the error and the job continues.
struct Refusal {
  std::string name;
  Error error;
};

/// The next actions of all ranks. The order of plans and of their items is the same on all ranks. Knobs come first, and
/// only with a bucket. So no rank receives knobs while it runs an operation that its host agreed on in the lane.
using Plan = std::vector<std::variant<Bucket, Refusal, Knobs>>;

}  // namespace farandole
