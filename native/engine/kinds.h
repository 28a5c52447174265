#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace farandole {

enum class Kind : uint8_t {
  Allreduce = 0,
  Allgather = 1,
  Broadcast = 2,
  Alltoall = 3,
  Reducescatter = 4,
  Barrier = 5,
  Join = 6,  // no more data: the rank counts as making the others' requests until all have joined
};

/// The tensor that an operation returns.
enum class ResultSize : uint8_t {
  NoTensor,  // the operation has neither input nor output
  OfInput,   // the output has the input's shape
  ByPlan,    // the plan determines the number of rows
};

/// The contribution of a joined rank, which makes no request.
enum class JoinedPart : uint8_t {
  Refused,   // the operation fails
  NoTensor,  // the rank only takes part
  Zeros,
  Neutral,  // values that do not change the result of the reduction
  NoRows,
};

/// The traits of a kind of operation: all that the engine knows of it, apart from the algorithms.
struct KindTraits {
  const char* name;
  ResultSize result;
  JoinedPart joined;
  bool reduces = false;      // dtype, op and factors matter; the other kinds move bytes
  bool has_root = false;     // uses Request::root; fails if the root has joined
  bool has_splits = false;   // uses Request::splits; fails if rows are sent to a joined rank
  bool is_ragged = false;    // ranks may differ in their first dimensions, which the plan contains
  bool is_numbered = false;  // the plan depends only on the request, so a number can stand for it
  bool fuses = false;        // fusing is faster in host memory, too; NCCL runs operations of any kind as one group
  bool in_lane = false;      // can run without the coordinator
  bool is_kept = false;      // Python's calls keep one operation for the next request of its name
  bool on_nccl = false;      // NCCL can carry it; tensors on GPUs go through host memory otherwise

  [[nodiscard]] constexpr bool has_tensor() const { return result != ResultSize::NoTensor; }
  [[nodiscard]] constexpr bool is_sized_by_plan() const { return result == ResultSize::ByPlan; }
};

/// One row for each kind, in the order of Kind. It is in a header because the plugins are built without the core.
inline constexpr std::array kKindTraits{
    KindTraits{.name = "allreduce",
               .result = ResultSize::OfInput,
               .joined = JoinedPart::Neutral,
               .reduces = true,
               .is_numbered = true,
               .fuses = true,
               .in_lane = true,
               .is_kept = true,
               .on_nccl = true},
    KindTraits{.name = "allgather",
               .result = ResultSize::ByPlan,
               .joined = JoinedPart::NoRows,
               .is_ragged = true,
               .on_nccl = true},
    KindTraits{.name = "broadcast",
               .result = ResultSize::OfInput,
               .joined = JoinedPart::Zeros,
               .has_root = true,
               .is_numbered = true,
               .fuses = true,
               .in_lane = true,
               .on_nccl = true},
    KindTraits{.name = "alltoall",
               .result = ResultSize::ByPlan,
               .joined = JoinedPart::NoRows,
               .has_splits = true,
               .is_ragged = true,
               .on_nccl = true},
    KindTraits{.name = "reducescatter",
               .result = ResultSize::ByPlan,
               .joined = JoinedPart::Refused,
               .reduces = true,
               .is_numbered = true,
               .on_nccl = true},
    KindTraits{.name = "barrier",
               .result = ResultSize::NoTensor,
               .joined = JoinedPart::NoTensor,
               .is_numbered = true,
               .in_lane = true},
    KindTraits{.name = "join", .result = ResultSize::NoTensor, .joined = JoinedPart::Refused},
};

inline constexpr auto kKinds = static_cast<uint8_t>(kKindTraits.size());

[[nodiscard]] constexpr const KindTraits& traits_of(Kind kind) { return kKindTraits[static_cast<size_t>(kind)]; }
[[nodiscard]] constexpr const char* name_of(Kind kind) { return traits_of(kind).name; }

}  // namespace farandole
