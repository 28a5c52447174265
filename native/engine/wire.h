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

/// What a rank tells the coordinator: numbers of signatures that are known, requests in full for the rest.
using Asking = std::vector<std::variant<uint32_t, Request>>;

/// `rank` is gone: cleanly, after it had done all its part, or not, and then the job is over.
struct Farewell {
  int32_t rank = -1;
  bool clean = false;
  std::string reason;
};

using Message = std::variant<Asking, Plan, Farewell>;

/// Appends one message, framed by its length, to `out`.
void encode(const Asking& asking, Bytes& out);
void encode(const Plan& plan, Bytes& out);
void encode(const Farewell& farewell, Bytes& out);

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
