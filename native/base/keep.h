#pragma once

#include <memory>

namespace farandole {

/// Keeps `memory` until the process ends, because a transport or a device may still write to it.
void keep_for_ever(std::shared_ptr<void> memory);

}  // namespace farandole
