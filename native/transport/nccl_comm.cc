#include "transport/nccl_comm.h"

#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace farandole {
namespace {

constexpr std::chrono::microseconds kNap{50};
constexpr uint64_t kFarewell = 1'000'000'000;  // ns; limit for the end of a communicator

}  // namespace

NcclComm::NcclComm(std::shared_ptr<const NcclLibrary> library, const NcclLibrary::UniqueId& id, int rank, int size,
                   Guard& guard)
    : library_(std::move(library)), guard_(guard) {
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
  if (code != NcclLibrary::kSuccess) {
    abort();
    return;
  }
  library_->comm_destroy(comm_);
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
  const std::string text = library_->text_of(function, code, comm_);
  abort();
  throw Error::fabric("", text);
}

void NcclComm::check() {
  require_alive();
  int code = NcclLibrary::kSuccess;
  require("ncclCommGetAsyncError", library_->comm_get_async_error(comm_, &code));
  require("an operation of NCCL", code);
}

/// Wait until a call that has returned `code` has settled.
void NcclComm::settle(const char* function, int code) {
  try {
    while (true) {
      require(function, code);
      if (code == NcclLibrary::kSuccess) return;
      guard_.check();
      std::this_thread::sleep_for(kNap);
      require("ncclCommGetAsyncError", library_->comm_get_async_error(comm_, &code));
    }
  } catch (...) {
    abort();
    throw;
  }
}

void NcclComm::abort() noexcept {
  if (comm_ == nullptr) return;
  library_->comm_abort(std::exchange(comm_, nullptr));
}

}  // namespace farandole
