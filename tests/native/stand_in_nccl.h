// What the stand-in for NCCL is made of: communicators of ranks that are threads of one process, and their operations.
//
// As in NCCL, calls of a communicator that does not block return before their work is in its streams, an operation
// waits in its stream for those of the other ranks, in the order of the calls, and has no deadline; inputs are read
// when all have arrived. The sends and receives of a group run at once, each with its partner's. So a missing wait, or
// an end of the communicator that ends nothing, is a wrong result.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/half.h"

namespace stand_in {

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

enum class What { AllReduce, Broadcast, AllGather, ReduceScatter, Reduce };

/// One rank's call of an operation.
struct Call {
  What what = What::AllReduce;
  uint64_t in = 0, out = 0;
  size_t count = 0;
  int type = 0, op = 0, root = 0;
  double factor = 1;  // of the inputs

  [[nodiscard]] bool reduces() const { return what != What::Broadcast && what != What::AllGather; }
  [[nodiscard]] bool fits(const Call& other) const {
    return what == other.what && count == other.count && type == other.type && op == other.op && root == other.root &&
           factor == other.factor;
  }
};

/// An operation of all ranks. Its members need the lock of the devices.
struct Round {
  std::map<int, Call> calls;
  std::vector<std::byte> result;
  bool done = false;
};

/// A send and its receive. Its members need the lock of the devices.
struct Transfer {
  uint64_t in = 0, out = 0;
  size_t sent = 0, received = 0;
  bool has_in = false, has_out = false, done = false;
};

/// The state that the ranks of a communicator share.
struct Group {
  std::atomic<int> size{0};
  std::atomic<int> arrived{0};
  std::mutex mu;
  std::map<uint64_t, std::shared_ptr<Round>> rounds;
  std::map<std::tuple<int, int, uint64_t>, std::shared_ptr<Transfer>> transfers;  // by sender, receiver, number

  std::shared_ptr<Transfer> transfer(int from, int to, uint64_t number) {
    const std::lock_guard lock(mu);
    std::shared_ptr<Transfer>& found = transfers[{from, to, number}];
    if (!found) found = std::make_shared<Transfer>();
    return found;
  }
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
  std::map<std::pair<int, int>, uint64_t> transfers;  // by sender and receiver
  std::atomic<int> busy{0};
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<std::atomic<int>> in_streams = std::make_shared<std::atomic<int>>(0);  // work that has not ended
  bool finalizes = false;
  std::map<int, double> operators;
  int device = 0;  // the current one when it was made

  /// Returns whether its last call has settled: others may not be made before.
  [[nodiscard]] bool is_ready() const { return group->arrived >= group->size && busy == 0; }
  /// Returns false while it waits for its work before its end.
  [[nodiscard]] bool is_finalized() const { return !finalizes || *in_streams == 0; }
};

/// A call in a stream.
struct Work {
  std::shared_ptr<Group> group;
  std::shared_ptr<Round> round;
  std::shared_ptr<std::atomic<bool>> aborted;
  std::shared_ptr<std::atomic<int>> in_streams;
  int rank = 0;
  Call call;
};

/// A rank's side of a transfer of a group.
struct Side {
  std::shared_ptr<Transfer> transfer;
  bool sends = false;
  uint64_t address = 0;
  size_t bytes = 0;
  bool is_far = false;  // between two ranks
};

/// The sends and receives of a group in a stream.
struct Exchange {
  std::shared_ptr<std::atomic<bool>> aborted;
  std::shared_ptr<std::atomic<int>> in_streams;
  std::vector<Side> sides;
};

inline std::mutex mu;
inline std::map<Id, std::shared_ptr<Group>> groups;
inline int version = 22705;
inline int next_id = 0;
inline std::atomic<int> failure{0}, broken{0}, stuck{0}, far{0};
inline std::atomic<int> aborted{0}, destroyed{0}, mismatches{0}, run{0}, groups_run{0};
inline std::atomic<int> strays{0};  // calls that made a context on another device, or would have
inline thread_local int depth = 0;
inline thread_local std::vector<std::function<void()>> collected;
inline thread_local std::vector<Comm*> members;
inline thread_local std::unique_ptr<Exchange> exchange;  // of the group
inline thread_local Stream* exchange_stream = nullptr;

template <class F>
F cuda(const char* name) {
  static void* loaded = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* found = loaded == nullptr ? nullptr : ::dlsym(loaded, name);
  if (found == nullptr) std::abort();
  return reinterpret_cast<F>(found);
}

inline void* memory(uint64_t address, size_t bytes) {
  static const auto function = cuda<void* (*)(uint64_t, size_t)>("stand_in_memory");
  return function(address, bytes);
}

/// Returns the thread's current device; without one NCCL takes the first and makes a context there.
inline int current_device() {
  static const auto get = cuda<int (*)(int*)>("cuCtxGetDevice");
  int device = 0;
  if (get(&device) != 0) ++strays;
  return device;
}

/// Counts a call for a communicator of another device: NCCL sets its own and then the thread's again.
inline void note_call(const Comm& comm) {
  if (current_device() != comm.device) ++strays;
}

inline size_t width(int type) {
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
  const size_t count = first.count * (first.what == What::ReduceScatter ? round.calls.size() : 1);
  round.result.resize(count * width(first.type));
  for (size_t i = 0; i < count; ++i) {
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

inline void reduce_halves(Round& round, float (*widen)(uint16_t), uint16_t (*narrow)(float)) {
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

inline void gather(Round& round, const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    const auto* from = static_cast<const std::byte*>(memory(call.in, call.count));
    if (from != nullptr) round.result.insert(round.result.end(), from, from + call.count);
  }
}

inline void compute(Round& round) {
  const Call& first = round.calls.begin()->second;
  ++run;
  for (const auto& [rank, call] : round.calls)
    if (!call.fits(first)) ++mismatches;
  if (first.what == What::Broadcast) return gather(round, {round.calls[first.root]});
  if (first.what == What::AllGather) {
    std::vector<Call> calls;
    for (const auto& [rank, call] : round.calls) calls.push_back(call);
    return gather(round, calls);
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

/// Breaks the devices if a rank, whose thread works on another device, cannot reach the buffers of a call. NCCL reads
/// and writes those of other threads of a process directly.
inline void require_reachable(const Call& call) {
  static const auto is_reachable = cuda<int (*)(uint64_t)>("stand_in_is_reachable");
  for (const uint64_t address : {call.in, call.out})
    if (is_reachable(address) == 0) memory(0, 1);
}

/// A step of a call in its stream; returns whether it has ended. With the lock of the devices.
inline bool step(void* cookie) {
  auto* work = static_cast<Work*>(cookie);
  Round& round = *work->round;
  if (!work->aborted->load()) {
    if (work->group->size > 1) require_reachable(work->call);
    round.calls.emplace(work->rank, work->call);
    if (!round.done && (stuck != 0 || static_cast<int>(round.calls.size()) < work->group->size)) return false;
    if (!round.done) compute(round);
    round.done = true;
    const Call& call = work->call;
    const bool takes = call.what != What::Reduce || call.root == work->rank;
    const size_t bytes =
        call.what == What::ReduceScatter ? round.result.size() / round.calls.size() : round.result.size();
    const size_t from = call.what == What::ReduceScatter ? bytes * static_cast<size_t>(work->rank) : 0;
    void* to = takes ? memory(call.out, bytes) : nullptr;
    if (to != nullptr) std::memcpy(to, round.result.data() + from, bytes);
  }
  --*work->in_streams;
  delete work;
  return true;
}

/// A step of a group's sends and receives; as step().
inline bool transfer(void* cookie) {
  auto* own = static_cast<Exchange*>(cookie);
  bool done = true;
  for (const Side& side : own->sides) {
    if (own->aborted->load()) break;
    Transfer& each = *side.transfer;
    if (side.is_far) require_reachable({.in = side.address});
    (side.sends ? each.in : each.out) = side.address;
    (side.sends ? each.sent : each.received) = side.bytes;
    (side.sends ? each.has_in : each.has_out) = true;
    if (each.has_in && each.has_out && !each.done && stuck == 0) {
      ++run;
      if (each.sent != each.received) ++mismatches;
      const void* from = memory(each.in, each.sent);
      void* to = memory(each.out, each.sent);
      if (from != nullptr && to != nullptr) std::memcpy(to, from, each.sent);
      each.done = true;
    }
    done = done && each.done;
  }
  if (!done && !own->aborted->load()) return false;
  --*own->in_streams;
  delete own;
  return true;
}

inline void put(Stream* stream, bool (*next)(void*), void* cookie) {
  static const auto add = cuda<void (*)(Stream*, bool (*)(void*), void*)>("stand_in_add");
  add(stream, next, cookie);
}

inline int enqueue_transfer(Comm* comm, Stream* stream, bool sends, int peer, uint64_t address, size_t bytes) {
  if (depth == 0 || (exchange_stream != nullptr && exchange_stream != stream)) return kInvalidUsage;
  if (!comm->is_ready()) return kInvalidArgument;
  const int from = sends ? comm->rank : peer, to = sends ? peer : comm->rank;
  const uint64_t number = comm->transfers[{from, to}]++ / (from == to ? 2 : 1);  // a rank's own: both are its calls
  if (!exchange) {
    ++*comm->in_streams;
    exchange = std::make_unique<Exchange>(Exchange{comm->aborted, comm->in_streams, {}});
  }
  exchange->sides.push_back({comm->group->transfer(from, to, number), sends, address, bytes, from != to});
  exchange_stream = stream;
  members.push_back(comm);
  return 0;
}

inline int enqueue(Comm* comm, Stream* stream, const Call& call) {
  if (depth == 0) return kInvalidUsage;  // not used like this
  if (!comm->is_ready()) return kInvalidArgument;
  members.push_back(comm);
  ++*comm->in_streams;
  collected.push_back([comm, stream, call, number = comm->rounds++] {
    put(stream, step,
        new Work{comm->group, comm->group->round(number), comm->aborted, comm->in_streams, comm->rank, call});
  });
  return 0;
}

}  // namespace stand_in
