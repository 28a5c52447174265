#include "transport/nccl_comm.h"

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace farandole {
namespace {

constexpr std::chrono::microseconds kNap{50};
constexpr uint64_t kSoon = 200'000;            // ns; a wait does not sleep before
constexpr uint64_t kFarewell = 1'000'000'000;  // ns; limit for finalizing a communicator

}  // namespace

NcclComm::NcclComm(std::shared_ptr<const NcclLibrary> library, CudaDevice& device, const NcclLibrary::UniqueId& id,
                   int rank, int size, Guard& guard, std::function<void(const Error&)> before_abort)
    : library_(std::move(library)),
      device_(device),
      rank_(rank),
      guard_(guard),
      before_abort_(std::move(before_abort)) {
  const CudaDevice::Current current(device_);
  NcclLibrary::Config config;
  const int code = library_->comm_init_rank_config(&comm_, size, id, rank, &config);
  settle("ncclCommInitRankConfig", code);
}

/// Make `call` with the device as the current one, or without it if the device is broken.
template <class Call>
void NcclComm::on_device(Call call) noexcept {
  std::optional<CudaDevice::Current> current;
  try {
    current.emplace(device_);
  } catch (const Error&) {
    // The communicator must end even if the device is broken.
  }
  call();
}

NcclComm::~NcclComm() {
  if (comm_ == nullptr) return;
  on_device([this] {
    int code = library_->comm_finalize(comm_);
    for (const uint64_t until = now_ns() + kFarewell; code == NcclLibrary::kInProgress && now_ns() < until;) {
      std::this_thread::sleep_for(kNap);
      if (library_->comm_get_async_error(comm_, &code) != NcclLibrary::kSuccess) break;
    }
    if (code == NcclLibrary::kSuccess) library_->comm_destroy(comm_);
    else library_->comm_abort(comm_);
  });
}

NcclLibrary::UniqueId NcclComm::make_id(const NcclLibrary& library, const CudaDevice& device) {
  const CudaDevice::Current current(device);
  NcclLibrary::UniqueId id{};
  if (const int code = library.get_unique_id(&id); code != NcclLibrary::kSuccess)
    throw Error::fabric("", library.text_of("ncclGetUniqueId", code, nullptr));
  return id;
}

void NcclComm::require_alive() const {
  if (comm_ == nullptr) throw Error::fabric("", "NCCL's communicator was aborted when an operation failed");
}

void NcclComm::require(const char* function, int code) {
  if (code == NcclLibrary::kSuccess || code == NcclLibrary::kInProgress) return;
  const Error error = Error::fabric("", library_->text_of(function, code, comm_));
  abort(error);
  throw error;
}

void NcclComm::check() {
  require_alive();
  const CudaDevice::Current current(device_);
  int code = NcclLibrary::kSuccess;
  require("ncclCommGetAsyncError", library_->comm_get_async_error(comm_, &code));
  require("an operation of NCCL", code);
}

/// Wait until a call that has returned `code` is complete. A thread of NCCL puts operations into their streams, some
/// 20 us after the call; a new connection takes longer.
void NcclComm::settle(const char* function, int code) {
  for (const uint64_t begun = now_ns(); true;) {
    require(function, code);
    if (code == NcclLibrary::kSuccess) return;
    try {
      guard_.check();
    } catch (const Error& error) {
      abort(error);
      throw;
    }
    if (now_ns() < begun + kSoon) std::this_thread::yield();
    else std::this_thread::sleep_for(kNap);
    require("ncclCommGetAsyncError", library_->comm_get_async_error(comm_, &code));
  }
}

void NcclComm::abort(const Error& error) noexcept {
  if (comm_ == nullptr) return;
  before_abort_(error);
  on_device([this] { library_->comm_abort(std::exchange(comm_, nullptr)); });
}

}  // namespace farandole
