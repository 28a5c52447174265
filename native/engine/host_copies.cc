#include "engine/host_copies.h"

#include <chrono>
#include <memory>
#include <thread>

#include "engine/device_marks.h"

namespace farandole {
namespace {

constexpr std::chrono::microseconds kNap{20};  // between two checks of a copy

}  // namespace

HostCopies::HostCopies(PinnedPool& pool, std::span<const OperationPtr> operations, int rank, Guard& guard) {
  std::vector<CudaMark> arrived;
  for (const OperationPtr& operation : operations) {
    if (!operation->side) continue;
    move(*operation, pool, rank);
    CudaDevice& device = *operation->side->device;
    arrived.push_back(device.mark(device.to_host()));
  }
  for (const CudaMark& mark : arrived)
    for (; !mark.passed(); std::this_thread::sleep_for(kNap)) guard.check();
}

/// Point the operation to pinned memory, and start to copy its input there.
void HostCopies::move(Operation& operation, PinnedPool& pool, int rank) {
  DeviceSide& side = *operation.side;
  CudaDevice& device = *side.device;
  const Request& request = operation.request;
  side.is_begun = true;
  moved_.push_back({&operation, operation.input, operation.output});
  side.copies.push_back(pool.take(device, request.bytes()));
  std::byte* copy = side.copies.back().data();
  hold_for(side, device.to_host());
  const bool gives = !traits_of(request.kind).has_root || request.root == rank;
  if (gives && request.bytes() > 0)
    device.copy_to_host(copy, reinterpret_cast<CudaDevice::Address>(operation.input), request.bytes(),
                        device.to_host());
  operation.input = copy;
  if (!traits_of(request.kind).is_sized_by_plan()) {
    operation.output = copy;
  } else if (operation.output != nullptr) {
    side.copies.push_back(pool.take(device, operation.room));
    operation.output = side.copies.back().data();
  }  // otherwise the listener allocates memory for the result
}

HostCopies::~HostCopies() {
  for (const Moved& each : moved_) {
    each.operation->input = each.input;
    each.operation->output = each.output;
  }
}

void HostCopies::return_results() {
  for (const Moved& each : moved_) {
    const Operation& operation = *each.operation;
    DeviceSide& side = *operation.side;
    CudaDevice& device = *side.device;
    const size_t bytes =
        traits_of(operation.request.kind).is_sized_by_plan() ? operation.room : operation.request.bytes();
    if (each.output != nullptr && !operation.error && bytes > 0)
      device.copy_to_device(reinterpret_cast<CudaDevice::Address>(each.output), side.copies.back().data(), bytes,
                            device.to_device());
    side.after = std::make_shared<const CudaMark>(device.mark(device.to_device()));
  }
}

}  // namespace farandole
