// A library with MPI's functions whose processes are the threads of one process, for tests of the fabric "mpi". It
// speaks MPICH's ABI. Each thread first takes a rank; calls are as slow as a lock, and complete only in MPI_Test.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Bytes = std::vector<char>;
using Operator = void (*)(void*, void*, int*, int*);
using Ranks = std::vector<int>;

constexpr int kWorld = 0x44000000;
constexpr int kNoRequest = 0x2c000000;
constexpr int kFirstOperator = 0x58000100;  // numbers of MPI_Op_create
const void* const kInPlace = reinterpret_cast<const void*>(-1);

struct Slot {  // one collective call
  size_t arrived = 0;
  std::map<int, Bytes> inputs;  // by rank of the communicator
  Bytes reduced;                // of all inputs, since the first look at it
};

struct Comm {
  Ranks members;
  std::map<int, size_t> calls;  // collectives that each rank has started
  std::map<size_t, Slot> slots;
  std::map<std::pair<int, int>, std::deque<Bytes>> messages;  // from, to
};

std::mutex mu;
int size = 1;
int granted = 3;
int failure = 0;
thread_local int own_rank = 0;
std::map<int, Comm> comms;
std::map<Ranks, std::map<int, int>> created;   // how often each rank has made a communicator of these
std::map<std::pair<Ranks, int>, int> numbers;  // of the n-th communicator of these
std::vector<Ranks> groups;
std::vector<Operator> operators;
std::deque<std::function<bool()>> requests;

int size_of(int type) { return type >> 8 & 0xff; }

int place_in(const Comm& comm) {
  return static_cast<int>(std::find(comm.members.begin(), comm.members.end(), own_rank) - comm.members.begin());
}

Slot& enter(Comm& comm, int place, Bytes input) {
  Slot& slot = comm.slots[comm.calls[place]++];
  ++slot.arrived;
  slot.inputs[place] = std::move(input);
  return slot;
}

Bytes bytes_of(const void* from, size_t bytes) {
  const char* data = static_cast<const char*>(from);
  return bytes > 0 ? Bytes(data, data + bytes) : Bytes();
}

void place_bytes(char* to, const Bytes& from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

int make_request(std::function<bool()> poll, int* request) {
  requests.push_back(std::move(poll));
  *request = static_cast<int>(requests.size());
  return 0;
}

template <class T>
void combine(int op, const void* in, void* in_out, int count) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(in_out);
  for (int i = 0; i < count; ++i) {
    if (op == 1) to[i] = to[i] < from[i] ? from[i] : to[i];
    else if (op == 2) to[i] = from[i] < to[i] ? from[i] : to[i];
    else if (op == 3) to[i] = static_cast<T>(to[i] + from[i]);
    else to[i] = static_cast<T>(to[i] * from[i]);
  }
}

void combine(int type, int op, void* in, void* in_out, int count) {
  if (op >= kFirstOperator) return operators[static_cast<size_t>(op - kFirstOperator)](in, in_out, &count, &type);
  op &= 0xff;
  switch (type) {
    case 0x4c00013b: return combine<uint8_t>(op, in, in_out, count);
    case 0x4c000137: return combine<int8_t>(op, in, in_out, count);
    case 0x4c00023c: return combine<uint16_t>(op, in, in_out, count);
    case 0x4c000238: return combine<int16_t>(op, in, in_out, count);
    case 0x4c00043d: return combine<uint32_t>(op, in, in_out, count);
    case 0x4c000439: return combine<int32_t>(op, in, in_out, count);
    case 0x4c00083e: return combine<uint64_t>(op, in, in_out, count);
    case 0x4c00083a: return combine<int64_t>(op, in, in_out, count);
    case 0x4c00040a: return combine<float>(op, in, in_out, count);
    default: return combine<double>(op, in, in_out, count);
  }
}

}  // namespace

extern "C" {

// Tests set up this library by the next three functions, which real MPI libraries do not have.

/// Begin a test with `ranks` processes, to which MPI grants the thread level `threads`.
void stand_in_start(int ranks, int threads) {
  const std::lock_guard lock(mu);
  size = ranks;
  granted = threads;
  failure = 0;
}
/// Make the calling thread the process `rank`.
void stand_in_rank(int rank) { own_rank = rank; }
/// Let MPI_Test fail with `code` from now on.
void stand_in_fail(int code) {
  const std::lock_guard lock(mu);
  failure = code;
}

int MPI_Finalized(int* flag) {
  *flag = 0;
  return 0;
}
int MPI_Query_thread(int* level) {
  *level = granted;
  return 0;
}
int MPI_Comm_rank(int comm, int* rank) {
  const std::lock_guard lock(mu);
  *rank = comm == kWorld ? own_rank : place_in(comms[comm]);
  return 0;
}
int MPI_Comm_size(int comm, int* ranks) {
  const std::lock_guard lock(mu);
  *ranks = comm == kWorld ? size : static_cast<int>(comms[comm].members.size());
  return 0;
}
int MPI_Comm_group(int /*comm*/, int* group) {
  const std::lock_guard lock(mu);
  groups.emplace_back();
  for (int rank = 0; rank < size; ++rank) groups.back().push_back(rank);
  *group = static_cast<int>(groups.size()) - 1;
  return 0;
}
int MPI_Group_incl(int group, int count, const int* ranks, int* made) {
  const std::lock_guard lock(mu);
  Ranks chosen;
  for (int i = 0; i < count; ++i) chosen.push_back(groups[static_cast<size_t>(group)][static_cast<size_t>(ranks[i])]);
  groups.push_back(std::move(chosen));
  *made = static_cast<int>(groups.size()) - 1;
  return 0;
}
int MPI_Group_free(int* /*group*/) { return 0; }
int MPI_Comm_create_group(int /*comm*/, int group, int /*tag*/, int* made) {
  const std::lock_guard lock(mu);
  const Ranks& members = groups[static_cast<size_t>(group)];
  int& number = numbers[{members, created[members][own_rank]++}];
  if (number == 0) {
    number = kWorld + 1 + static_cast<int>(comms.size());
    comms[number].members = members;
  }
  *made = number;
  return 0;
}
int MPI_Comm_set_errhandler(int /*comm*/, int /*handler*/) { return 0; }
int MPI_Comm_free(int* /*comm*/) { return 0; }
int MPI_Op_create(Operator function, int /*commutes*/, int* op) {
  const std::lock_guard lock(mu);
  operators.push_back(function);
  *op = kFirstOperator + static_cast<int>(operators.size()) - 1;
  return 0;
}
int MPI_Error_string(int code, char* text, int* length) {
  *length = std::snprintf(text, 64, "stand-in error %d", code);
  return 0;
}
int MPI_Test(int* request, int* flag, void* /*status*/) {
  const std::lock_guard lock(mu);
  if (failure != 0) return failure;
  *flag = *request == kNoRequest || requests[static_cast<size_t>(*request) - 1]() ? 1 : 0;
  if (*flag != 0) *request = kNoRequest;
  return 0;
}

int MPI_Iallreduce(const void* in, void* out, int count, int type, int op, int number, int* request) {
  const std::lock_guard lock(mu);
  Comm& comm = comms[number];
  const int place = place_in(comm);
  Slot& slot = enter(comm, place, bytes_of(in == kInPlace ? out : in, static_cast<size_t>(count * size_of(type))));
  return make_request(
      [&comm, &slot, out, count, type, op] {
        if (slot.arrived < comm.members.size()) return false;
        if (slot.reduced.empty() && count > 0) {
          slot.reduced = std::move(slot.inputs.at(0));
          for (auto each = std::next(slot.inputs.begin()); each != slot.inputs.end(); ++each)
            combine(type, op, each->second.data(), slot.reduced.data(), count);
          slot.inputs.clear();
        }
        place_bytes(static_cast<char*>(out), slot.reduced);
        return true;
      },
      request);
}
int MPI_Iallgatherv(const void* in, int count, int /*type*/, void* out, const int* counts, const int* places,
                    int /*type*/, int number, int* request) {
  const std::lock_guard lock(mu);
  Comm& comm = comms[number];
  const int place = place_in(comm);
  char* to = static_cast<char*>(out);
  const void* from = in == kInPlace ? to + places[place] : in;
  Slot& slot = enter(comm, place, bytes_of(from, static_cast<size_t>(in == kInPlace ? counts[place] : count)));
  return make_request(
      [&comm, &slot, to, places] {
        if (slot.arrived < comm.members.size()) return false;
        for (const auto& [rank, input] : slot.inputs) place_bytes(to + places[rank], input);
        return true;
      },
      request);
}
int MPI_Ibcast(void* data, int count, int /*type*/, int root, int number, int* request) {
  const std::lock_guard lock(mu);
  Comm& comm = comms[number];
  const int place = place_in(comm);
  Slot& slot = enter(comm, place, place == root ? bytes_of(data, static_cast<size_t>(count)) : Bytes());
  return make_request(
      [&slot, data, place, root] {
        if (!slot.inputs.contains(root)) return false;
        if (place != root) place_bytes(static_cast<char*>(data), slot.inputs.at(root));
        return true;
      },
      request);
}
int MPI_Isend(const void* data, int count, int /*type*/, int to, int /*tag*/, int number, int* request) {
  const std::lock_guard lock(mu);
  Comm& comm = comms[number];
  comm.messages[{place_in(comm), to}].push_back(bytes_of(data, static_cast<size_t>(count)));
  return make_request([] { return true; }, request);
}
int MPI_Irecv(void* data, int /*count*/, int /*type*/, int from, int /*tag*/, int number, int* request) {
  const std::lock_guard lock(mu);
  Comm& comm = comms[number];
  std::deque<Bytes>& messages = comm.messages[{from, place_in(comm)}];
  return make_request(
      [&messages, data] {
        if (messages.empty()) return false;
        place_bytes(static_cast<char*>(data), messages.front());
        messages.pop_front();
        return true;
      },
      request);
}
}
