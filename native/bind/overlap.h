// Memory that tensors share: an operation on a group may not overwrite it twice.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace farandole {

/// Pieces of memory: the address and the number of bytes of each.
using Spans = std::vector<std::pair<const std::byte*, size_t>>;

/// Returns whether two of the spans have a byte in common.
[[nodiscard]] bool overlap(Spans spans);

/// Returns whether two tensors of a sequence have a byte in common, as tied weights do. False if capture() refuses one
/// of them, for example because it is not contiguous.
[[nodiscard]] bool share_memory(nanobind::handle tensors);

}  // namespace farandole
