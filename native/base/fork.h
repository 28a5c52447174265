#pragma once

#include <cstdint>

namespace farandole {

/// A number that a forked child does not share with its parent: what was made under another number is not this
/// process'. Costs a load, where getpid() would be a system call.
[[nodiscard]] uint32_t fork_number() noexcept;

}  // namespace farandole
