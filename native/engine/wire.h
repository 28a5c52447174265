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

/// Stands for the rank that sends the message.
inline constexpr int32_t kSender = -1;

/// Requests by number, from `first` to `first + count - 1`, of `rank` or, with `whole`, of `rank` and all ranks below
/// it. kSender always stands for the sender's whole subtree.
struct NumberRange {
  int32_t rank = kSender;
  bool whole = true;
  uint32_t first = 0;
  uint32_t count = 1;

  bool operator==(const NumberRange&) const = default;
};

/// A full request of `rank`; its signature has no number yet.
struct FullRequest {
  int32_t rank = 0;
  Request request;

  bool operator==(const FullRequest&) const = default;
};

/// A request of `rank` by number, with its input; see carried.h.
struct RequestWithInput {
  int32_t rank = 0;
  uint32_t id = 0;
  Bytes input;

  bool operator==(const RequestWithInput&) const = default;
};

/// Requests on their way up the tree.
using CollectedRequests = std::vector<std::variant<NumberRange, FullRequest, RequestWithInput>>;

/// Stands for a rank that is not known.
inline constexpr int32_t kNoRank = -1;

/// `rank` has left: cleanly, after doing its part, or not, which ends the job. `first` is the rank that left first, as
/// far as the sender knows; the others may only have followed. Without a rank, the job ends because an operation was
/// not over in time, and no rank is known to be the cause.
struct Departure {
  int32_t rank = kNoRank;
  bool clean = false;
  std::string reason;
  int32_t first = -1;
};

/// A sign of life on an idle connection.
struct Heartbeat {};

using Message = std::variant<CollectedRequests, Plan, Departure, Heartbeat>;

/// Appends one message, prefixed by its length, to `out`. A run of consecutive numbers in a plan takes a few bytes.
void encode(const CollectedRequests& collected, Bytes& out);
void encode(const Plan& plan, Bytes& out);
void encode(const Departure& departure, Bytes& out);
void encode(const Heartbeat& heartbeat, Bytes& out);

/// Bytes of a frame's length prefix.
inline constexpr size_t kFrameHeader = 4;

/// The longest accepted frame: a million full requests.
inline constexpr uint32_t kLongestFrame = 256u << 20;

/// Returns the length of a frame's body. Throws Error (Internal) if it is above the limit.
[[nodiscard]] uint32_t frame_length(std::span<const std::byte> header);

/// Decodes the body of a frame. Throws Error (Internal) for input that encode() cannot have written. Never reads beyond
/// `body`, and allocates at most a few hundred bytes for each of its bytes.
[[nodiscard]] Message decode(std::span<const std::byte> body);

}  // namespace farandole
