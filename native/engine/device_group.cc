#include "engine/device_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "collectives/lent.h"
#include "collectives/nccl_collectives.h"
#include "engine/device_run.h"
#include "engine/device_side.h"
#include "engine/execute.h"

namespace farandole {
namespace {

/// Message of rank 0 to the other ranks, from which they create the communicator.
struct Invitation {
  NcclLibrary::UniqueId id{};
  bool is_made = false;
};

constexpr uint64_t kGrace = 1'000'000'000;  // ns; time for operations to complete after a rank has left
constexpr std::chrono::microseconds kNap{100};

/// Returns whether a joined rank's zeros leave the result unchanged. They do not change sums; operations that only move
/// data take nothing from a joined rank.
bool takes_zeros(const Request& request) {
  return !traits_of(request.kind).reduces || request.op == ReduceOp::Sum || request.op == ReduceOp::Average;
}

/// Returns a number that no other process has, not even one forked from the same parent.
std::array<uint64_t, 2> own_process() {
  static const uint64_t made = std::random_device()() | uint64_t{std::random_device()()} << 32;
  return {made, static_cast<uint64_t>(::getpid())};
}

/// Waits until the work in `stream` has completed, for kGrace at most; returns whether it has. It completes if a rank
/// has left in order, or this one shuts down, because such a rank has done its part.
bool ends_by_itself(CudaDevice& device, CudaDevice::Stream stream) {
  try {
    const CudaMark last = device.mark(stream);
    for (const uint64_t until = now_ns() + kGrace; now_ns() < until; std::this_thread::sleep_for(kNap))
      if (last.passed()) return true;
  } catch (const Error&) {
    // A broken device completes nothing.
  }
  return false;
}

template <class Value>
std::vector<Value> gathered(World& world, const Value& mine, int size) {
  const Lent<std::vector<Value>> all(world, static_cast<size_t>(size));
  std::vector<std::byte*> out;
  for (Value& each : *all) out.push_back(reinterpret_cast<std::byte*>(&each));
  const std::vector<size_t> bytes(all->size(), sizeof(Value));
  world.allgather(reinterpret_cast<const std::byte*>(&mine), out, bytes);
  return *all;
}

}  // namespace

bool fits_nccl(Kind kind, DType dtype, const Reduction& reduction) {
  const KindTraits& traits = traits_of(kind);
  return traits.on_nccl && (!traits.reduces || nccl_reduces(dtype, reduction));
}

DeviceGroup::DeviceGroup(int rank, int size, std::vector<int> members, GpuOptions options, Guard& guard)
    : rank_(rank), size_(size), members_(std::move(members)), options_(std::move(options)), guard_(guard) {}

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
  if (stream_ == nullptr) return;
  device_->end_stream(std::exchange(stream_, nullptr));
  device_->trim_pool();  // another engine on this device takes new memory
}

bool DeviceGroup::takes(const std::string& name, Kind kind, DType dtype, const Reduction& reduction,
                        CudaDevice& device) {
  const bool through_host = options_.through_host[static_cast<size_t>(kind)];
  if (!fits_nccl(kind, dtype, reduction) || excludes_nccl(options_.through_host)) return false;
  const std::lock_guard lock(mu_);
  if (decision_ && !decision_->uses_nccl(kind)) return false;
  if (device_ == nullptr) {
    device_ = &device;
    try {
      library_ = std::make_shared<const NcclLibrary>(options_.nccl_files);
      if (!device.has_memory_pools())
        why_not_ = "its driver has no memory pools; CUDA 11.2 or later has them, on most GPUs";
    } catch (const Error& error) {
      why_not_ = error.reason;
    }
  }
  if (&device == device_) return why_not_.empty() && !through_host;
  if (told_ && why_not_.empty())
    throw Error::invalid(name, "its tensor lies on CUDA device " + std::to_string(device.ordinal()) +
                                   ", and this rank uses NCCL on device " + std::to_string(device_->ordinal()) +
                                   "; use one GPU for each rank, or set HOROVOD_GPU_OPERATIONS=MPI");
  why_not_ = "it works on several GPUs; use one for each rank";
  return false;
}

DeviceCard DeviceGroup::card() {
  DeviceCard card;
  card.through_host = options_.through_host;
  card.by_nccl = options_.by_nccl;
  card.may_share = options_.may_share;
  card.process = own_process();
  const std::lock_guard lock(mu_);
  try {
    if (why_not_.empty() && device_ != nullptr) card.gpu = device_->uuid();
  } catch (const Error& error) {
    why_not_ = error.reason;
  }
  if (device_ == nullptr) why_not_ = "its settings exclude NCCL; use the same settings on all ranks";
  card.is_able = why_not_.empty();
  card.version = library_ ? library_->version() : 0;
  std::strncpy(card.why_not.data(), why_not_.c_str(), card.why_not.size() - 1);
  told_ = true;
  return card;
}

void DeviceGroup::agree(World& world) {
  const std::vector<DeviceCard> cards = gathered(world, card(), size_);
  DeviceDecision decision = decide(cards, members_);
  if (decision.why_not.empty() && shares_process(cards, rank_)) device_->share_pool();
  if (rank_ == 0 && !decision.why_not.empty() && !decision.is_by_settings)
    warn("tensors on GPUs go through host memory, because ", decision.why_not,
         "; set HOROVOD_GPU_OPERATIONS=MPI to choose this route without a warning");
  const std::lock_guard lock(mu_);
  decision_ = std::move(decision);
}

DeviceGroup::Choice DeviceGroup::choose(World& world, std::span<const OperationPtr> operations, bool has_joined) {
  const Request& first = operations.front()->request;
  if (!first.on_device || !fits_nccl(first.kind, first.dtype, reduction_of(first, size_))) return {};
  if (has_joined && (!decision_ || !takes_zeros(first))) return {};
  if (!decision_) agree(world);
  return {decision_->uses_nccl(first.kind), decision_->refusal(first)};
}

void DeviceGroup::connect(World& world) {
  Invitation own;
  std::optional<Error> problem;
  if (rank_ == 0) {
    try {
      own.id = NcclComm::make_id(*library_, *device_);
      own.is_made = true;
    } catch (const Error& error) {
      problem = error;
    }
  }
  const Invitation given = gathered(world, own, size_).front();
  if (problem) throw *problem;
  if (!given.is_made)
    throw Error::fabric(
        "", "rank " + std::to_string(job_rank(0, members_)) + " could not make an id for NCCL's communicator");
  stream_ = device_->make_stream(true);  // urgent, because the other ranks wait for its work
  comm_ = std::make_unique<NcclComm>(library_, *device_, given.id, rank_, size_, guard_,
                                     [this](const Error& error) { note(error); });
}

const char* DeviceGroup::run(World& world, const Bucket& bucket, std::span<const OperationPtr> operations) {
  const std::lock_guard lock(comm_mu_);
  try {
    if (!comm_) connect(world);
    DeviceRun(*comm_, *device_, stream_, size_).enqueue(bucket, operations);
  } catch (const Error& error) {
    if (comm_) comm_->abort(error);
    // No more work enters the stream, so free the memory behind the work that is there.
    for (const OperationPtr& operation : operations)
      if (operation->side && !operation->side->after) operation->side->result.end_in(stream_);
    throw;
  }
  return "nccl";
}

std::optional<Error> DeviceGroup::watch(const std::optional<Error>& lost, bool may_end) noexcept {
  const std::unique_lock lock(comm_mu_, std::try_to_lock);
  if (!lock || !comm_ || comm_->is_aborted()) return std::nullopt;  // run() has the lock: its guard detects losses
  try {
    if (!lost) {
      comm_->check();
      return std::nullopt;
    }
    if (!may_end || !ends_by_itself(*device_, stream_)) comm_->abort(*lost);
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

std::optional<Error> DeviceGroup::failure() {
  const std::lock_guard lock(mu_);
  return failure_;
}

/// Store the failure, before the abort ends operations on the device.
void DeviceGroup::note(const Error& error) noexcept {
  const std::lock_guard lock(mu_);
  if (!failure_) failure_ = error;
}

}  // namespace farandole
