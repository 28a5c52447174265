// A library with NCCL's functions for ranks that are threads of one process, over the stand-in for the CUDA driver; see
// stand_in_nccl.h. The tests' own functions begin with stand_in_.
#include "stand_in_nccl.h"

using namespace stand_in;

namespace {

uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

int enqueue_reduction(What what, const void* in, void* out, size_t count, int type, int op, int root, Comm* comm,
                      Stream* stream) {
  Call call{what, address_of(in), address_of(out), count, type, op, root};
  if (const auto own = comm->operators.find(op); own != comm->operators.end()) {
    call.op = 0;
    call.factor = own->second;
  } else if (op >= 4) {
    return kInvalidArgument;
  }
  return enqueue(comm, stream, call);
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
  current_device();
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
  group->arrived += far != 0 ? size : 1;
  *comm = new Comm;
  (*comm)->group = group;
  (*comm)->rank = rank;
  (*comm)->device = current_device();
  return kInProgress;
}

int ncclCommGetAsyncError(Comm* comm, int* code) {
  const bool waits = comm->group->arrived < comm->group->size || comm->busy > 0 || !comm->is_finalized();
  *code = broken != 0 ? broken.load() : waits ? kInProgress : 0;
  return 0;
}

int ncclCommAbort(Comm* comm) {
  note_call(*comm);
  ++aborted;
  *comm->aborted = true;
  while (comm->busy > 0) std::this_thread::yield();
  delete comm;
  return 0;
}
/// The work that is in streams ends first.
int ncclCommFinalize(Comm* comm) {
  note_call(*comm);
  comm->finalizes = true;
  return comm->is_finalized() ? 0 : kInProgress;
}
int ncclCommDestroy(Comm* comm) {
  note_call(*comm);
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
  note_call(*comm);
  ++groups_run;
  ++comm->busy;
  if (exchange)
    collected.push_back([stream = exchange_stream, all = exchange.release()] { put(stream, transfer, all); });
  exchange_stream = nullptr;
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
  if (residence != 1 || !comm->is_ready()) return kInvalidArgument;
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
  return enqueue_reduction(What::AllReduce, in, out, count, type, op, 0, comm, stream);
}

int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm, Stream* stream) {
  return enqueue_reduction(What::ReduceScatter, in, out, count, type, op, 0, comm, stream);
}

int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, Comm* comm, Stream* stream) {
  return enqueue_reduction(What::Reduce, in, out, count, type, op, root, comm, stream);
}

int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, Stream* stream) {
  if (type != 1) return kInvalidArgument;
  return enqueue(comm, stream, {What::Broadcast, address_of(in), address_of(out), count, type, 0, root});
}

int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, Stream* stream) {
  if (type != 1) return kInvalidArgument;
  return enqueue(comm, stream, {What::AllGather, address_of(in), address_of(out), count, type});
}

int ncclSend(const void* in, size_t count, int type, int peer, Comm* comm, Stream* stream) {
  if (type != 1) return kInvalidArgument;
  return enqueue_transfer(comm, stream, true, peer, address_of(in), count);
}

int ncclRecv(void* out, size_t count, int type, int peer, Comm* comm, Stream* stream) {
  if (type != 1) return kInvalidArgument;
  return enqueue_transfer(comm, stream, false, peer, address_of(out), count);
}

// The tests' own.
void stand_in_version(int given) { version = given; }
void stand_in_nccl_fail(int code) { failure = code; }  // of new communicators
void stand_in_nccl_break(int code) { broken = code; }  // what communicators tell of their operations
void stand_in_nccl_stuck(int on) { stuck = on; }       // operations never end by themselves
void stand_in_nccl_far(int on) { far = on; }           // the other ranks are other processes: nothing comes from them
int stand_in_nccl_aborted() { return aborted; }
int stand_in_nccl_destroyed() { return destroyed; }
int stand_in_nccl_mismatches() { return mismatches; }  // ranks that called operations in different orders
int stand_in_nccl_strays() { return strays; }          // calls without the device of their communicator
int stand_in_nccl_groups() { return groups_run; }      // of all ranks
int stand_in_nccl_run() { return run; }                // operations of all ranks that were computed

}  // extern "C"
