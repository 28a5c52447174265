#include "transport/mpi_mesh.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/keep.h"

namespace farandole {
namespace {

// MPI moves data only during calls of MPI, so a wait that sleeps also delays the peers. A wait sleeps only once it has
// lasted longer than the transfer takes on a slow network.
constexpr uint64_t kBusy = 20'000'000;            // ns; a wait does not sleep before
constexpr uint64_t kBusyPerByte = 20;             // ns to add per byte; a network of 50 MB/s
constexpr uint64_t kExplanation = 1'000'000'000;  // ns; time for the report of a lost rank that explains an MPI error
constexpr std::chrono::microseconds kNap{50};
constexpr uint64_t kLookEvery = 16;

std::atomic<bool> abandoned{false};

/// A group of MPI's processes.
struct Group {
  explicit Group(MpiLibrary& library) : library(library) {}
  ~Group() {
    if (handle != 0) library.group_free(&handle);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  MpiLibrary& library;
  MpiLibrary::Handle handle = 0;
};

void require(const MpiLibrary& library, const char* function, int code) {
  if (code != 0) throw Error::fabric("", library.text_of(function, code));
}

void require_threads(const MpiLibrary& library) {
  int granted = 0;
  require(library, "MPI_Query_thread", library.query_thread(&granted));
  if (granted < library.thread_multiple)
    throw Error::invalid("fabric", "MPI was started without MPI_THREAD_MULTIPLE (level " + std::to_string(granted) +
                                       "), and the engine calls it from several threads; start MPI with that level, "
                                       "or call init() before the program starts MPI");
}

}  // namespace

MpiComm::MpiComm(void* loaded, const std::vector<int>& ranks)
    : library_(MpiLibrary::of(loaded)), fork_number_(fork_number()) {
  if (has_abandoned())
    throw Error::fabric("", "a failed operation has left MPI waiting for a lost rank; restart the job");
  require_threads(library_);
  Group all(library_), chosen(library_);
  require(library_, "MPI_Comm_group", library_.comm_group(library_.world, &all.handle));
  require(library_, "MPI_Group_incl",
          library_.group_incl(all.handle, static_cast<int>(ranks.size()), ranks.data(), &chosen.handle));
  require(library_, "MPI_Comm_create_group", library_.comm_create_group(library_.world, chosen.handle, 0, &comm_));
  try {
    require(library_, "MPI_Comm_set_errhandler", library_.comm_set_errhandler(comm_, library_.errors_return));
    require(library_, "MPI_Comm_rank", library_.comm_rank(comm_, &rank_));
    require(library_, "MPI_Comm_size", library_.comm_size(comm_, &size_));
  } catch (...) {
    library_.comm_free(&comm_);
    throw;
  }
}

MpiComm::~MpiComm() {
  int ended = 0;
  if (fork_number_ != fork_number() || has_abandoned() || library_.finalized(&ended) != 0 || ended != 0) return;
  library_.comm_free(&comm_);
}

bool MpiComm::has_abandoned() { return abandoned.load(); }

MpiMesh::MpiMesh(std::shared_ptr<MpiComm> comm, Guard& guard, WaitPolicy policy, bool direct)
    : comm_(std::move(comm)), guard_(guard), policy_(policy), direct_(direct), memory_(std::make_unique<Memory>()) {}

MpiMesh::~MpiMesh() {
  if (memory_ == nullptr || !MpiComm::has_abandoned()) return;
  keep_for_ever(std::move(memory_));
}

std::byte* MpiMesh::grown(std::vector<std::byte>& memory, size_t bytes) {
  if (memory.size() < bytes) memory.resize(bytes);
  return memory.data();
}

void MpiMesh::finish(size_t bytes) {
  const uint64_t begin = now_ns();
  try {
    for (Handle& request : memory_->requests) wait(request, begin, kBusy + kBusyPerByte * bytes);
  } catch (...) {
    abandoned.store(true);
    throw;
  }
  memory_->requests.clear();
}

void MpiMesh::wait(Handle& request, uint64_t begin, uint64_t busy) {
  uint64_t waited = 0;
  for (uint64_t tests = 1;; ++tests) {
    int done = 0;
    if (const int code = library().test(&request, &done, library().ignored_status); code != 0) fail("MPI_Test", code);
    if (done != 0) return;
    if (tests % kLookEvery == 0 || waited > busy) {
      guard_.check();
      waited = now_ns() - begin;
    }
    const auto spin = static_cast<uint64_t>(guard_.spins_briefly() ? 0 : policy_.spin.count());
    if (waited > busy) std::this_thread::sleep_for(kNap);
    else if (waited > spin) sched_yield();
    else relax();
  }
}

/// Throw the loss of a rank if one explains the error, else the error itself.
void MpiMesh::fail(const char* function, int code) {
  abandoned.store(true);
  const uint64_t until = now_ns() + kExplanation;
  while (now_ns() < until) {
    guard_.check();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw Error::fabric("", library().text_of(function, code));
}

}  // namespace farandole
