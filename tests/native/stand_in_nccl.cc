// A library with NCCL's functions for ranks that are threads of one process, over the stand-in for the CUDA driver.
//
// As in NCCL, calls of a communicator that does not block return before their work is in its streams, an operation
// waits in its stream for those of the other ranks, in the order of the calls, and has no deadline; inputs are read
// when all have arrived. So a missing wait, or an end of the communicator that ends nothing, is a wrong result.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/half.h"

namespace {

constexpr int kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7;
constexpr int kFirstOwnOperator = 5;

struct Stream;

struct Id {
  std::array<char, 128> bytes;
  bool operator<(const Id& other) const { return bytes < other.bytes; }
};

struct Config {
  size_t size;
  uint32_t magic, version;
  int blocking;
};

/// One rank's call of an operation.
struct Call {
  bool reduces = false;
  uint64_t in = 0, out = 0;
  size_t count = 0;
  int type = 0, op = 0, root = 0;
  double factor = 1;  // of the inputs

  [[nodiscard]] bool fits(const Call& other) const {
    return reduces == other.reduces && count == other.count && type == other.type && op == other.op &&
           root == other.root && factor == other.factor;
  }
};

/// An operation of all ranks. Its members need the lock of the devices.
struct Round {
  std::map<int, Call> calls;
  std::vector<std::byte> result;
  bool done = false;
};

/// The state that the ranks of a communicator share.
struct Group {
  std::atomic<int> size{0};
  std::atomic<int> arrived{0};
  std::mutex mu;
  std::map<uint64_t, std::shared_ptr<Round>> rounds;

  std::shared_ptr<Round> round(uint64_t number) {
    const std::lock_guard lock(mu);
    std::shared_ptr<Round>& found = rounds[number];
    if (!found) found = std::make_shared<Round>();
    return found;
  }
};

struct Comm {
  std::shared_ptr<Group> group;
  int rank = 0;
  uint64_t rounds = 0;
  std::atomic<int> busy{0};
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  std::map<int, double> operators;
};

/// A call in a stream.
struct Work {
  std::shared_ptr<Group> group;
  std::shared_ptr<Round> round;
  std::shared_ptr<std::atomic<bool>> aborted;
  int rank = 0;
  Call call;
};

std::mutex mu;
std::map<Id, std::shared_ptr<Group>> groups;
int version = 22705;
int next_id = 0;
std::atomic<int> failure{0}, broken{0}, stuck{0};
std::atomic<int> aborted{0}, destroyed{0}, mismatches{0}, run{0};
thread_local int depth = 0;
thread_local std::vector<std::function<void()>> collected;
thread_local std::vector<Comm*> members;

template <class F>
F cuda(const char* name) {
  static void* loaded = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* found = loaded == nullptr ? nullptr : ::dlsym(loaded, name);
  if (found == nullptr) std::abort();
  return reinterpret_cast<F>(found);
}

void* memory(uint64_t address, size_t bytes) {
  static const auto function = cuda<void* (*)(uint64_t, size_t)>("stand_in_memory");
  return function(address, bytes);
}

size_t width(int type) {
  constexpr std::array<size_t, 10> widths{1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return widths.at(static_cast<size_t>(type));
}

template <class T>
T combine(int op, T a, T b) {
  switch (op) {
    case 1: return static_cast<T>(a * b);
    case 2: return std::max(a, b);
    case 3: return std::min(a, b);
    default: return static_cast<T>(a + b);
  }
}

template <class T, class Read, class Write>
void reduce_as(Round& round, Read read, Write write) {
  const Call& first = round.calls.begin()->second;
  round.result.resize(first.count * width(first.type));
  for (size_t i = 0; i < first.count; ++i) {
    T sum{};
    bool begun = false;
    for (const auto& [rank, call] : round.calls) {
      const auto* at = static_cast<const std::byte*>(memory(call.in, round.result.size()));
      if (at == nullptr) return;
      T value = read(at + i * width(first.type));
      if (call.factor != 1) value = static_cast<T>(value * static_cast<T>(call.factor));
      sum = begun ? combine(first.op, sum, value) : value;
      begun = true;
    }
    write(round.result.data() + i * width(first.type), sum);
  }
}

template <class T>
void reduce_plain(Round& round) {
  reduce_as<T>(
      round,
      [](const std::byte* at) {
        T value;
        std::memcpy(&value, at, sizeof value);
        return value;
      },
      [](std::byte* at, T value) { std::memcpy(at, &value, sizeof value); });
}

void reduce_halves(Round& round, float (*widen)(uint16_t), uint16_t (*narrow)(float)) {
  reduce_as<float>(
      round,
      [&](const std::byte* at) {
        uint16_t value;
        std::memcpy(&value, at, sizeof value);
        return widen(value);
      },
      [&](std::byte* at, float value) {
        const uint16_t half = narrow(value);
        std::memcpy(at, &half, sizeof half);
      });
}

void compute(Round& round) {
  const Call& first = round.calls.begin()->second;
  ++run;
  for (const auto& [rank, call] : round.calls)
    if (!call.fits(first)) ++mismatches;
  if (!first.reduces) {
    const auto* from = static_cast<const std::byte*>(memory(round.calls[first.root].in, first.count));
    if (from != nullptr) round.result.assign(from, from + first.count);
    return;
  }
  switch (first.type) {
    case 0: return reduce_plain<int8_t>(round);
    case 1: return reduce_plain<uint8_t>(round);
    case 2: return reduce_plain<int32_t>(round);
    case 3: return reduce_plain<uint32_t>(round);
    case 4: return reduce_plain<int64_t>(round);
    case 5: return reduce_plain<uint64_t>(round);
    case 6: return reduce_halves(round, farandole::fp16_to_fp32, farandole::fp32_to_fp16);
    case 7: return reduce_plain<float>(round);
    case 8: return reduce_plain<double>(round);
    default: return reduce_halves(round, farandole::bf16_to_fp32, farandole::fp32_to_bf16);
  }
}

/// A step of a call in its stream; returns whether it has ended. With the lock of the devices.
bool step(void* cookie) {
  auto* work = static_cast<Work*>(cookie);
  Round& round = *work->round;
  if (!work->aborted->load()) {
    round.calls.emplace(work->rank, work->call);
    if (!round.done && (stuck != 0 || static_cast<int>(round.calls.size()) < work->group->size)) return false;
    if (!round.done) compute(round);
    round.done = true;
    void* to = memory(work->call.out, round.result.size());
    if (to != nullptr) std::memcpy(to, round.result.data(), round.result.size());
  }
  delete work;
  return true;
}

int enqueue(Comm* comm, Stream* stream, const Call& call) {
  if (depth == 0) return kInvalidUsage;  // not used like this
  members.push_back(comm);
  collected.push_back([comm, stream, call, number = comm->rounds++] {
    static const auto add = cuda<void (*)(Stream*, bool (*)(void*), void*)>("stand_in_add");
    add(stream, step, new Work{comm->group, comm->group->round(number), comm->aborted, comm->rank, call});
  });
  return 0;
}

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
  std::shared_ptr<Group>& group = groups[id];
  if (!group) group = std::make_shared<Group>();
  group->size = size;
  ++group->arrived;
  *comm = new Comm;
  (*comm)->group = group;
  (*comm)->rank = rank;
  return kInProgress;
}

int ncclCommGetAsyncError(Comm* comm, int* code) {
  *code = broken != 0 ? broken.load() : comm->group->arrived < comm->group->size || comm->busy > 0 ? kInProgress : 0;
  return 0;
}

int ncclCommAbort(Comm* comm) {
  ++aborted;
  *comm->aborted = true;
  while (comm->busy > 0) std::this_thread::yield();
  delete comm;
  return 0;
}
int ncclCommFinalize(Comm*) { return 0; }
int ncclCommDestroy(Comm* comm) {
  ++destroyed;
  delete comm;
  return 0;
}

int ncclGroupStart() {
  ++depth;
  return 0;
}

/// Puts the work into its streams later.
int ncclGroupEnd() {
  if (--depth > 0) return 0;
  if (members.empty()) return 0;
  Comm* comm = members.front();
  ++comm->busy;
  std::thread([comm, calls = std::move(collected)] {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    for (const auto& call : calls) call();
    --comm->busy;
  }).detach();
  collected.clear();
  members.clear();
  return kInProgress;
}

int ncclRedOpCreatePreMulSum(int* op, void* factor, int type, int residence, Comm* comm) {
  if (residence != 1) return kInvalidArgument;
  double value = 0;
  uint16_t half = 0;
  float single = 0;
  std::memcpy(&half, factor, sizeof half);
  std::memcpy(&single, factor, sizeof single);
  if (type == 8) std::memcpy(&value, factor, sizeof value);
  else if (type == 7) value = single;
  else value = type == 6 ? farandole::fp16_to_fp32(half) : farandole::bf16_to_fp32(half);
  *op = kFirstOwnOperator;
  while (comm->operators.count(*op) != 0) ++*op;
  comm->operators[*op] = value;
  return 0;
}

int ncclRedOpDestroy(int op, Comm* comm) { return comm->operators.erase(op) == 1 ? 0 : kInvalidArgument; }

int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, Stream* stream) {
  Call call{true, reinterpret_cast<uint64_t>(in), reinterpret_cast<uint64_t>(out), count, type, op};
  if (const auto own = comm->operators.find(op); own != comm->operators.end()) {
    call.op = 0;
    call.factor = own->second;
  } else if (op >= 4) {
    return kInvalidArgument;
  }
  return enqueue(comm, stream, call);
}

int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, Stream* stream) {
  if (type != 1) return kInvalidArgument;
  return enqueue(comm, stream,
                 {false, reinterpret_cast<uint64_t>(in), reinterpret_cast<uint64_t>(out), count, type, 0, root});
}

// The tests' own.
void stand_in_version(int given) { version = given; }
void stand_in_nccl_fail(int code) { failure = code; }  // of new communicators
void stand_in_nccl_break(int code) { broken = code; }  // what communicators tell of their operations
void stand_in_nccl_stuck(int on) { stuck = on; }       // operations never end by themselves
int stand_in_nccl_aborted() { return aborted; }
int stand_in_nccl_destroyed() { return destroyed; }
int stand_in_nccl_mismatches() { return mismatches; }  // ranks that called operations in different orders
int stand_in_nccl_run() { return run; }                // operations of all ranks that were computed

}  // extern "C"
