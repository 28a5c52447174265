// A library with NCCL's functions for communicators whose ranks are threads, for tests without a GPU. It moves no data.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

constexpr int kInvalidArgument = 4, kInProgress = 7;

struct Id {
  std::array<char, 128> bytes;
  bool operator<(const Id& other) const { return bytes < other.bytes; }
};

struct Comm {
  Id id;
  int size;
  int error = 0;
};

struct Config {
  size_t size;
  uint32_t magic, version;
  int blocking;
};

std::mutex mu;
std::map<Id, int> arrived;  // ranks of each communicator
int version = 22705;
int next_id = 0;
int failure = 0;
int broken = 0;
std::atomic<int> aborted{0};
std::atomic<int> destroyed{0};

}  // namespace

extern "C" {

int ncclGetVersion(int* found) {
  *found = version;
  return 0;
}

const char* ncclGetErrorString(int code) { return code == 1 ? "unhandled cuda error" : "remote process error"; }
const char* ncclGetLastError(Comm*) { return "the stand-in says so"; }

int ncclGetUniqueId(Id* id) {
  const std::lock_guard lock(mu);
  id->bytes.fill(0);
  const int number = ++next_id;
  std::memcpy(id->bytes.data(), &number, sizeof number);
  return 0;
}

int ncclCommInitRankConfig(Comm** comm, int size, Id id, int rank, const Config* config) {
  const std::lock_guard lock(mu);
  if (failure != 0) return failure;
  if (config->magic != 0xcafebeef || config->blocking != 0 || rank < 0 || rank >= size) return kInvalidArgument;
  *comm = new Comm{id, size};
  ++arrived[id];
  return kInProgress;
}

int ncclCommGetAsyncError(Comm* comm, int* code) {
  const std::lock_guard lock(mu);
  *code = broken != 0 ? broken : arrived[comm->id] < comm->size ? kInProgress : 0;
  return 0;
}

int ncclCommAbort(Comm* comm) {
  ++aborted;
  delete comm;
  return 0;
}
int ncclCommFinalize(Comm*) { return 0; }
int ncclCommDestroy(Comm* comm) {
  ++destroyed;
  delete comm;
  return 0;
}
int ncclGroupStart() { return 0; }
int ncclGroupEnd() { return 0; }
int ncclAllReduce(const void*, void*, size_t, int, int, Comm*, void*) { return 0; }
int ncclBroadcast(const void*, void*, size_t, int, int, Comm*, void*) { return 0; }
int ncclSend(const void*, size_t, int, int, Comm*, void*) { return 0; }
int ncclRecv(void*, size_t, int, int, Comm*, void*) { return 0; }

// The tests' own.
void stand_in_version(int given) { version = given; }
void stand_in_fail(int code) { failure = code; }  // of new communicators
void stand_in_break(int code) { broken = code; }  // what communicators tell of their operations
int stand_in_aborted() { return aborted; }
int stand_in_destroyed() { return destroyed; }

}  // extern "C"
