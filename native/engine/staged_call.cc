#include "engine/staged_call.h"

#include <algorithm>
#include <utility>

#include "base/keep.h"

namespace farandole {

void StagedCall::hold(CudaDevice& device, CudaDevice::Stream stream) const {
  device.require_running(stream, members_.front().operation->request.name);
  for (const Mark& mark : returned_)
    if (&mark->device() == &device) mark->hold(stream);
}

bool StagedCall::has_returned() const {
  return std::ranges::all_of(returned_, [](const Mark& mark) { return mark->passed(); });
}

std::vector<CudaDevice*> StagedCall::devices() const {
  std::vector<CudaDevice*> devices;
  for (const Mark& mark : returned_)
    if (std::ranges::find(devices, &mark->device()) == devices.end()) devices.push_back(&mark->device());
  return devices;
}

void StagedCall::release(bool device_works) {
  for (StagedCall::Member& member : members_) {
    const bool is_free = device_works && !member.operation->is_abandoned;
    if (!is_free) member.input.leak();
    if (!is_free && member.has_output) member.result.leak();
    if (!is_free && member.side) member.side->leak();
    if (member.side) member.side->copies.clear();
    member.input = PinnedBuffer();
    if (member.has_output) member.result = PinnedBuffer();
    if (!is_free) keep_for_ever(std::move(member.keep));
    member.keep.reset();
  }
}

}  // namespace farandole
