#include "engine/device_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/nccl_collectives.h"
#include "engine/device_side.h"
#include "engine/execute.h"

namespace farandole {
namespace {

constexpr std::chrono::microseconds kNap{20};  // between two looks at a copy

/// Rank 0's message to the others about the new communicator.
struct Invitation {
  NcclLibrary::UniqueId id{};
  bool is_made = false;
};

template <class Value>
std::vector<Value> gathered(World& world, const Value& mine, int size) {
  std::vector<Value> all(static_cast<size_t>(size));
  std::vector<std::byte*> out;
  for (Value& each : all) out.push_back(reinterpret_cast<std::byte*>(&each));
  const std::vector<size_t> bytes(all.size(), sizeof(Value));
  world.allgather(reinterpret_cast<const std::byte*>(&mine), out, bytes);
  return all;
}

/// Makes the later work in `stream` wait for the marks of the operations, once for each.
void follow(std::span<const OperationPtr> operations, CudaDevice::Stream stream) {
  std::vector<const CudaMark*> held;
  for (const OperationPtr& operation : operations)
    for (const auto& mark : operation->side->before) {
      if (std::ranges::find(held, mark.get()) != held.end()) continue;
      mark->hold(stream);
      held.push_back(mark.get());
    }
}

}  // namespace

bool fits_nccl(Kind kind, DType dtype, const Reduction& reduction) {
  return kind == Kind::Broadcast || (kind == Kind::Allreduce && nccl_reduces(dtype, reduction));
}

DeviceGroup::DeviceGroup(int rank, int size, GpuOptions options, Guard& guard)
    : rank_(rank), size_(size), options_(std::move(options)), guard_(guard) {}

DeviceGroup::~DeviceGroup() { close(false); }

void DeviceGroup::close(bool forked) noexcept {
  if (forked) {  // without the lock, which a thread of the parent may hold
    static_cast<void>(comm_.release());
    stream_ = nullptr;
    return;
  }
  if (comm_ == nullptr && stream_ == nullptr) return;
  const std::lock_guard lock(comm_mu_);
  comm_.reset();
  if (stream_ != nullptr) device_->end_stream(std::exchange(stream_, nullptr));
}

bool DeviceGroup::takes(const std::string& name, Kind kind, DType dtype, const Reduction& reduction,
                        CudaDevice& device) {
  const auto through_host = [this](Kind each) { return options_.through_host[static_cast<size_t>(each)]; };
  if (!fits_nccl(kind, dtype, reduction) || (through_host(Kind::Allreduce) && through_host(Kind::Broadcast)))
    return false;
  const std::lock_guard lock(mu_);
  if (decision_ && !decision_->uses_nccl(kind)) return false;
  if (device_ == nullptr) {
    device_ = &device;
    try {
      library_ = std::make_shared<const NcclLibrary>(options_.nccl_files);
    } catch (const Error& error) {
      why_not_ = error.reason;
    }
  }
  if (&device == device_) return why_not_.empty() && !through_host(kind);
  if (told_ && why_not_.empty())
    throw Error::invalid(name, "its tensor lies on CUDA device " + std::to_string(device.ordinal()) +
                                   ", and this rank uses NCCL on device " + std::to_string(device_->ordinal()) +
                                   "; use one GPU for each rank, or set HOROVOD_GPU_OPERATIONS=MPI");
  why_not_ = "it works on several GPUs";
  return false;
}

DeviceCard DeviceGroup::card() {
  DeviceCard card;
  card.through_host = options_.through_host;
  card.by_nccl = options_.by_nccl;
  const std::lock_guard lock(mu_);
  try {
    if (why_not_.empty() && device_ != nullptr) card.gpu = device_->uuid();
  } catch (const Error& error) {
    why_not_ = error.reason;
  }
  if (device_ == nullptr) why_not_ = "its settings exclude NCCL";
  card.is_able = why_not_.empty();
  card.version = library_ ? library_->version() : 0;
  std::strncpy(card.why_not.data(), why_not_.c_str(), card.why_not.size() - 1);
  told_ = true;
  return card;
}

void DeviceGroup::agree(World& world) {
  DeviceDecision decision = decide(gathered(world, card(), size_));
  const std::lock_guard lock(mu_);
  decision_ = std::move(decision);
}

DeviceGroup::Choice DeviceGroup::choose(World& world, std::span<const OperationPtr> operations, bool has_joined) {
  const Request& first = operations.front()->request;
  if (has_joined || !first.on_device || !fits_nccl(first.kind, first.dtype, reduction_of(first, size_))) return {};
  if (!decision_) agree(world);
  return {decision_->uses_nccl(first.kind), decision_->refusal(first)};
}

void DeviceGroup::connect(World& world) {
  Invitation own;
  std::optional<Error> problem;
  if (rank_ == 0) {
    try {
      own.id = NcclComm::make_id(*library_);
      own.is_made = true;
    } catch (const Error& error) {
      problem = error;
    }
  }
  const Invitation given = gathered(world, own, size_).front();
  if (problem) throw *problem;
  if (!given.is_made) throw Error::fabric("", "rank 0 could not make an id for NCCL's communicator");
  const CudaDevice::Current current(*device_);
  stream_ = device_->make_stream();
  comm_ =
      std::make_unique<NcclComm>(library_, given.id, rank_, size_, guard_, [this](const Error& error) { note(error); });
}

const char* DeviceGroup::run(World& world, std::span<const OperationPtr> operations) {
  const Request& first = operations.front()->request;
  const std::lock_guard lock(comm_mu_);
  try {
    if (!comm_) connect(world);
    std::vector<Piece> pieces;
    for (const OperationPtr& operation : operations) {
      if (!operation->side) throw Error::internal("an operation for NCCL is in host memory");
      pieces.push_back({operation->input, operation->output, operation->request.bytes()});
    }
    const CudaDevice::Current current(*device_);
    follow(operations, stream_);
    if (first.kind == Kind::Broadcast) nccl_broadcast(*comm_, stream_, pieces, first.root);
    else nccl_allreduce(*comm_, stream_, pieces, first.dtype, reduction_of(first, size_));
    const auto after = std::make_shared<const CudaMark>(device_->mark(stream_));
    for (const OperationPtr& operation : operations) operation->side->after = after;
  } catch (const Error& error) {
    if (comm_) comm_->abort(error);
    throw;
  }
  return "nccl";
}

std::optional<Error> DeviceGroup::watch(const std::optional<Error>& lost) noexcept {
  const std::unique_lock lock(comm_mu_, std::try_to_lock);
  if (!lock || !comm_ || comm_->is_aborted()) return std::nullopt;  // else a guard ends the work under way
  try {
    if (!lost) {
      const CudaDevice::Current current(*device_);
      comm_->check();
      return std::nullopt;
    }
    comm_->abort(*lost);
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

std::optional<Error> DeviceGroup::failure() {
  const std::lock_guard lock(mu_);
  return failure_;
}

/// Keep the failure, before operations on the device end by it.
void DeviceGroup::note(const Error& error) noexcept {
  const std::lock_guard lock(mu_);
  if (!failure_) failure_ = error;
}

HostCopies::HostCopies(PinnedPool& pool, std::span<const OperationPtr> operations, int rank, Guard& guard) {
  std::vector<CudaMark> arrived;
  for (const OperationPtr& operation : operations) {
    DeviceSide* side = operation->side.get();
    if (side == nullptr) continue;
    const Request& request = operation->request;
    CudaDevice& device = *side->device;
    side->copies.push_back(pool.take(device, request.bytes()));
    moved_.push_back({operation.get(), operation->input, operation->output});
    std::byte* copy = side->copies.back().data();
    follow({&operation, 1}, device.to_host());
    const bool gives = request.kind != Kind::Broadcast || request.root == rank;
    if (gives && request.bytes() > 0)
      device.copy_to_host(copy, reinterpret_cast<CudaDevice::Address>(operation->input), request.bytes(),
                          device.to_host());
    operation->input = operation->output = copy;
    arrived.push_back(device.mark(device.to_host()));
  }
  for (const CudaMark& mark : arrived)
    for (; !mark.passed(); std::this_thread::sleep_for(kNap)) guard.check();
}

HostCopies::~HostCopies() {
  for (const Moved& each : moved_) {
    each.operation->input = each.input;
    each.operation->output = each.output;
  }
}

void HostCopies::return_results() {
  for (const Moved& each : moved_) {
    DeviceSide& side = *each.operation->side;
    CudaDevice& device = *side.device;
    const size_t bytes = each.operation->request.bytes();
    if (bytes > 0)
      device.copy_to_device(reinterpret_cast<CudaDevice::Address>(each.output), side.copies.back().data(), bytes,
                            device.to_device());
    side.after = std::make_shared<const CudaMark>(device.mark(device.to_device()));
  }
}

}  // namespace farandole
