#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "engine/plan.h"
#include "engine/request.h"

namespace farandole {

using Bytes = std::vector<std::byte>;

/// In place of a rank: whoever sends the message.
inline constexpr int32_t kSender = -1;

/// The numbers `first` to `first + count - 1` are asked for by `rank`, or, with `whole`, by all ranks below it in the
/// tree as well, itself among them. The sender can only speak for its whole subtree.
struct Numbers {
  int32_t rank = kSender;
  bool whole = true;
  uint32_t first = 0;
  uint32_t count = 1;

  bool operator==(const Numbers&) const = default;
};

/// A request in full by `rank`, whose signature has no number yet.
struct Spelled {
  int32_t rank = 0;
  Request request;

  bool operator==(const Spelled&) const = default;
};

/// What goes up the tree to the coordinator.
using Gathered = std::vector<std::variant<Numbers, Spelled>>;

/// `rank` is gone: cleanly, after it had done all its part, or not, and then the job is over. `first` is who left
/// before all others, as far as the sender knows: the others may only have followed.
struct Farewell {
  int32_t rank = -1;
  bool clean = false;
  std::string reason;
  int32_t first = -1;
};

/// A sign of life, for a connection that has nothing else to carry.
struct Heartbeat {};

using Message = std::variant<Gathered, Plan, Farewell, Heartbeat>;

/// Appends one message, framed by its length, to `out`. Entries of a plan that are only a number take a few bytes for
/// each run of consecutive numbers.
void encode(const Gathered& gathered, Bytes& out);
void encode(const Plan& plan, Bytes& out);
void encode(const Farewell& farewell, Bytes& out);
void encode(const Heartbeat& heartbeat, Bytes& out);

/// Bytes of the length prefix of a frame.
inline constexpr size_t kFrameHeader = 4;

/// Longest frame that is accepted: a million requests in full.
inline constexpr uint32_t kLongestFrame = 256u << 20;

/// The length of the frame's body from its header. Throws Error (Internal) when it is absurd.
[[nodiscard]] uint32_t frame_length(std::span<const std::byte> header);

/// Reads one message from the body of a frame. Throws Error (Internal) for anything that encode() cannot have written;
/// never reads beyond `body` and never allocates more than a small multiple of it.
[[nodiscard]] Message decode(std::span<const std::byte> body);

}  // namespace farandole
