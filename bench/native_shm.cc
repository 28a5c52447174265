// Measures the time of one host's collectives between processes, without engine and Python.
//
// usage: native_shm RANKS ROUNDS [NAME [SLOT_KIB]], for only the operations whose name begins with NAME, and slots of
// SLOT_KIB.
// Each rank is a process. Before each operation it rewrites its whole buffer, untimed, and waits at a barrier. An
// operation lasts from the last begin to the last end. Each round measures all cells one after another, and the table
// shows medians over the rounds.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/shm_collectives.h"
#include "transport/arena.h"

using namespace farandole;

namespace {

constexpr size_t KiB = 1024, MiB = 1024 * KiB;
constexpr int kMostRanks = 16;
constexpr size_t kMostRepeats = 512;

class NoGuard : public Guard {
  void check() override {}
};

// Barrier counters and times, shared by the ranks besides the segment.
struct Board {
  struct alignas(128) Counter {
    std::atomic<uint32_t> value{0};
  };
  Counter arrived[kMostRanks];
  uint64_t begin[kMostRanks][kMostRepeats], end[kMostRanks][kMostRepeats];
};

struct Rank {
  int rank, size;
  Board& board;
  SharedMesh mesh;
  uint32_t meetings = 0;

  void meet() {
    board.arrived[rank].value.store(++meetings);
    for (int peer = 0; peer < size; ++peer)
      while (board.arrived[peer].value.load() < meetings)
        if (size > 2) sched_yield();
  }
};

struct Cell {
  std::string name;
  size_t bytes;
  std::function<void(Rank&, std::byte*, std::byte*)> run;
  bool registered = false;  // whether the first buffer is in the rank's arena
};

void reduce_all(Rank& rank, std::byte* buffer, size_t bytes, DType dtype) {
  const Piece piece{buffer, buffer, bytes};
  shm_allreduce(rank.mesh, {&piece, 1}, dtype, {.op = ReduceOp::Sum});
}

std::vector<Cell> cells(int size) {
  const auto n = static_cast<size_t>(size);
  std::vector<Cell> found;
  for (const size_t bytes : {64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB})
    found.push_back({"allreduce", bytes,
                     [bytes](Rank& rank, std::byte* a, std::byte*) { reduce_all(rank, a, bytes, DType::Float32); }});
  for (const size_t bytes : {64 * KiB, 1 * MiB, 16 * MiB, 64 * MiB})
    found.push_back({"registered", bytes,
                     [bytes](Rank& rank, std::byte* a, std::byte*) { reduce_all(rank, a, bytes, DType::Float32); },
                     true});
  for (const auto& [name, dtype] : {std::pair{"allreduce fp16", DType::Float16}, {"allreduce bf16", DType::BFloat16}})
    found.push_back({name, 16 * MiB,
                     [dtype = dtype](Rank& rank, std::byte* a, std::byte*) { reduce_all(rank, a, 16 * MiB, dtype); }});
  for (const size_t bytes : {1 * MiB, 16 * MiB}) {
    found.push_back({"allgather", bytes, [n, bytes](Rank& rank, std::byte* a, std::byte* b) {
                       std::vector<std::byte*> out(n);
                       for (size_t peer = 0; peer < n; ++peer) out[peer] = b + peer * bytes;
                       shm_allgather(rank.mesh, a, out, std::vector<size_t>(n, bytes));
                     }});
    found.push_back({"broadcast", bytes, [bytes](Rank& rank, std::byte* a, std::byte*) {
                       const Piece piece{a, a, bytes};
                       shm_broadcast(rank.mesh, {&piece, 1}, 0);
                     }});
    found.push_back({"alltoall", bytes, [n, bytes](Rank& rank, std::byte* a, std::byte* b) {
                       const std::vector<size_t> shares(n, bytes / n);
                       std::vector<const std::byte*> in(n);
                       std::vector<std::byte*> out(n);
                       for (size_t peer = 0; peer < n; ++peer) {
                         in[peer] = a + peer * (bytes / n);
                         out[peer] = b + peer * (bytes / n);
                       }
                       shm_alltoall(rank.mesh, in, shares, out, shares, bytes / n);
                     }});
    found.push_back({"reducescatter", bytes, [n, bytes](Rank& rank, std::byte* a, std::byte* b) {
                       const std::vector<size_t> counts(n, bytes / 4 / n);
                       shm_reducescatter(rank.mesh, a, b, counts, DType::Float32, {.op = ReduceOp::Sum});
                     }});
  }
  for (const size_t bytes : {1 * MiB, 16 * MiB, 64 * MiB})
    found.push_back({"a += b", bytes, [bytes](Rank&, std::byte* a, std::byte* b) {
                       const void* sources[] = {a, b};
                       reduce(DType::Float32, {.op = ReduceOp::Sum}, a, sources, bytes / 4);
                     }});
  return found;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double measure(Rank& rank, const Cell& cell, std::byte* a, std::byte* b) {
  const size_t repeats = std::clamp<size_t>(16 * MiB / cell.bytes, 3, 100);
  for (size_t k = 0; k < repeats; ++k) {
    std::memset(a, 0x3c, cell.bytes);
    rank.meet();
    rank.board.begin[rank.rank][k] = now_ns();
    cell.run(rank, a, b);
    rank.board.end[rank.rank][k] = now_ns();
  }
  rank.meet();
  std::vector<double> took;
  for (size_t k = 0; k < repeats; ++k) {
    uint64_t begin = 0, end = 0;
    for (int peer = 0; peer < rank.size; ++peer) {
      begin = std::max(begin, rank.board.begin[peer][k]);
      end = std::max(end, rank.board.end[peer][k]);
    }
    took.push_back(static_cast<double>(end - begin) / 1e3);
  }
  rank.meet();
  return median(took);
}

void be(int number, int size, int rounds, const std::string& only, std::shared_ptr<Segment> segment, Board& board) {
  NoGuard guard;
  const bool crowded = size > static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const WaitPolicy policy{std::chrono::microseconds(crowded ? 2 : 100)};
  const auto own = Arena::make(segment, number)->take(64 * MiB);
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  Rank rank{number, size, board, SharedMesh(std::move(segment), number, all, guard, policy)};
  std::vector<std::byte> a(64 * MiB), b(std::max<size_t>(64 * MiB, static_cast<size_t>(size) * 16 * MiB));
  std::map<std::string, std::vector<double>> times;
  std::vector<std::string> order;
  for (int round = -1; round < rounds; ++round) {
    for (const Cell& cell : cells(size)) {
      if (cell.name.rfind(only, 0) != 0) continue;
      const double took = measure(rank, cell, cell.registered ? own.get() : a.data(), b.data());
      const std::string title = cell.name + " " + std::to_string(cell.bytes / KiB);
      if (round < 0) order.push_back(title);
      else times[title].push_back(took);
    }
  }
  if (number != 0) return;
  for (const std::string& title : order)
    std::printf("%-24s %10.1f us [%.1f]\n", title.c_str(), median(times[title]),
                *std::min_element(times[title].begin(), times[title].end()));
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  const std::string only = argc > 3 ? argv[3] : "";
  const size_t slot = argc > 4 ? KiB * static_cast<size_t>(std::atoi(argv[4])) : 128 * KiB;
  if (size < 1 || size > kMostRanks || rounds < 1) {
    std::fprintf(stderr, "usage: %s RANKS ROUNDS [NAME [SLOT_KIB]]\n", argv[0]);
    return 2;
  }
  void* shared = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  auto& board = *new (shared) Board;
  const auto segment = Segment::create(size, slot, false);
  std::vector<pid_t> children;
  for (int rank = 1; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      be(rank, size, rounds, only, segment, board);
      _exit(0);
    }
    children.push_back(child);
  }
  be(0, size, rounds, only, segment, board);
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed |= status;
  }
  return failed == 0 ? 0 : 1;
}
