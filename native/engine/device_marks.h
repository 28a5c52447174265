#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "device/cuda_device.h"
#include "engine/device_side.h"

namespace farandole {

using Marks = std::vector<std::shared_ptr<const CudaMark>>;

/// Returns whether all marks have passed. Throws Error (Fabric) if a device has failed.
[[nodiscard]] bool passed(const Marks& marks);

/// Waits for a second at most until all marks have passed; returns whether they have. For copies whose memory is about
/// to be freed.
bool wait_briefly(const Marks& marks) noexcept;

/// Makes later work in `stream` wait for the work that the operation depends on.
void hold_for(const DeviceSide& side, CudaDevice::Stream stream);

/// Adds a mark per device that has copies of `members` in the stream that `stream` returns.
template <class Members, class StreamOf>
void add_marks(Marks& marks, const Members& members, StreamOf stream) {
  std::vector<CudaDevice*> devices;
  for (const auto& member : members)
    if (member.device != nullptr && !member.side && std::ranges::find(devices, member.device) == devices.end())
      devices.push_back(member.device);
  for (CudaDevice* device : devices) marks.push_back(std::make_shared<const CudaMark>(device->mark(stream(*device))));
}

/// Adds the marks after the operations of `members` that ran in device memory.
template <class Members>
void add_ends(Marks& marks, const Members& members) {
  for (const auto& member : members)
    if (member.side && member.side->after && std::ranges::find(marks, member.side->after) == marks.end())
      marks.push_back(member.side->after);
}

}  // namespace farandole
