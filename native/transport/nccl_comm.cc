#include "transport/nccl_comm.h"

#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace farandole {
namespace {

constexpr std::chrono::microseconds kNap{50};
constexpr uint64_t kFarewell = 1'000'000'000;  // ns; limit for the end of a communicator

}  // namespace

NcclComm::NcclComm(std::shared_ptr<const NcclLibrary> library, const NcclLibrary::UniqueId& id, int rank, int size,
                   Guard& guard, std::function<void(const Error&)> before_abort)
    : library_(std::move(library)), rank_(rank), guard_(guard), before_abort_(std::move(before_abort)) {
  NcclLibrary::Config config;
  const int code = library_->comm_init_rank_config(&comm_, size, id, rank, &config);
  settle("ncclCommInitRankConfig", code);
}

NcclComm::~NcclComm() {
  if (comm_ == nullptr) return;
  int code = library_->comm_finalize(comm_);
  for (const uint64_t until = now_ns() + kFarewell; code == NcclLibrary::kInProgress && now_ns() < until;) {
    std::this_thread::sleep_for(kNap);
    if (library_->comm_get_async_error(comm_, &code) != NcclLibrary::kSuccess) break;
  }
  if (code == NcclLibrary::kSuccess) library_->comm_destroy(comm_);
  else library_->comm_abort(comm_);
}

NcclLibrary::UniqueId NcclComm::make_id(const NcclLibrary& library) {
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
  int code = NcclLibrary::kSuccess;
  require("ncclCommGetAsyncError", library_->comm_get_async_error(comm_, &code));
  require("an operation of NCCL", code);
}

/// Wait until a call that has returned `code` has settled.
void NcclComm::settle(const char* function, int code) {
  while (true) {
    require(function, code);
    if (code == NcclLibrary::kSuccess) return;
    try {
      guard_.check();
    } catch (const Error& error) {
      abort(error);
      throw;
    }
    std::this_thread::sleep_for(kNap);
    require("ncclCommGetAsyncError", library_->comm_get_async_error(comm_, &code));
  }
}

void NcclComm::abort(const Error& error) noexcept {
  if (comm_ == nullptr) return;
  before_abort_(error);
  library_->comm_abort(std::exchange(comm_, nullptr));
}

}  // namespace farandole
