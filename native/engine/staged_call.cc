#include "engine/staged_call.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace farandole {
namespace {

/// Keeps tensors alive that a copy may still use.
void keep_for_ever(std::shared_ptr<void> tensors) {
  static std::mutex mu;
  static auto* kept = new std::vector<std::shared_ptr<void>>();
  const std::lock_guard lock(mu);
  kept->push_back(std::move(tensors));
}

}  // namespace

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
    if (!device_works) member.input.leak();
    if (!device_works && member.has_output) member.result.leak();
    if (!device_works && member.side) member.side->leak();
    if (member.side) member.side->copies.clear();
    member.input = PinnedBuffer();
    if (member.has_output) member.result = PinnedBuffer();
    if (!device_works) keep_for_ever(std::move(member.keep));
    member.keep.reset();
  }
}

}  // namespace farandole
