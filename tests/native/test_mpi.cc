// The collectives over MPI, by a stand-in library whose ranks are threads: results, and the end of waits.
#include <dlfcn.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "collectives/mpi_fabric.h"
#include "link_elements.h"
#include "link_ranks.h"

namespace {

using namespace farandole;
using check::Elements;

constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product};

/// The stand-in library, and those of its functions that real MPI libraries do not have: tests set it up by them.
struct StandIn {
  void* loaded = ::dlopen(STAND_IN_MPI, RTLD_NOW | RTLD_LOCAL);
  void (*start)(int, int) = function<void (*)(int, int)>("stand_in_start");
  void (*take_rank)(int) = function<void (*)(int)>("stand_in_rank");
  void (*fail)(int) = function<void (*)(int)>("stand_in_fail");

  template <class F>
  F function(const char* name) const {
    return reinterpret_cast<F>(::dlsym(loaded, name));
  }
};

const StandIn& stand_in() {
  static const StandIn made;
  return made;
}

using Body = std::function<void(World&, int rank)>;

/// Waits for all ranks.
void meet(World& world) {
  int64_t one = 1;
  auto* at = reinterpret_cast<std::byte*>(&one);
  const Piece piece{at, at, sizeof one};
  world.allreduce({&piece, 1}, DType::Int64, {ReduceOp::Sum});
}

/// Runs `body` on `size` ranks; returns each rank's exception. With `direct`, ranks send to each other what MPI's own
/// collectives would move otherwise.
std::vector<std::optional<Error>> run(int size, const Body& body,
                                      std::chrono::milliseconds limit = std::chrono::seconds(60), bool direct = false) {
  stand_in().start(size, 3);
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::optional<Error>> errors(all.size());
  std::vector<std::thread> threads;
  for (const int rank : all)
    threads.emplace_back([&, rank] {
      stand_in().take_rank(rank);
      try {
        check::Deadline guard(limit);
        const MpiFabric fabric(stand_in().loaded, all);
        check::equal(fabric.rank(), rank);
        check::equal(fabric.size(), size);
        const auto world = fabric.make_world(guard, {std::chrono::microseconds(5)}, direct);
        body(*world, rank);
      } catch (const Error& error) {
        errors[static_cast<size_t>(rank)] = error;
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void must_run(int size, const Body& body) {
  for (const bool direct : {false, true})
    for (const auto& error : run(size, body, std::chrono::seconds(check::kSlow ? 200 : 60), direct))
      check::that(!error, error ? error->what() : "no error");
}

std::vector<int> sizes() { return check::kSlow ? std::vector{1, 3} : std::vector{1, 2, 3, 5}; }

void reduce_pieces(World& world, int rank, int size, DType dtype, const Reduction& reduction,
                   const std::vector<size_t>& counts, bool in_place) {
  const std::string context = std::string(name_of(dtype)) + " " + name_of(reduction.op) + ", " + std::to_string(size) +
                              " ranks" + (in_place ? ", in place" : "");
  std::vector<std::vector<std::byte>> in, out;
  std::vector<Piece> pieces;
  size_t first = 0;
  for (const size_t count : counts) {
    in.push_back(Elements(dtype).fill(rank, first, count));
    out.emplace_back(in.back().size());
    first += count;
  }
  for (size_t i = 0; i < in.size(); ++i)
    pieces.push_back({in[i].data(), in_place ? in[i].data() : out[i].data(), in[i].size()});
  world.allreduce(pieces, dtype, reduction);
  first = 0;
  for (size_t i = 0; i < in.size(); first += counts[i++]) {
    const auto expected = Elements(dtype).reduced(size, first, counts[i], reduction);
    check::that((in_place ? in[i] : out[i]) == expected, "result", context);
  }
}

void allreduce_of_every_type() {
  for (const int size : sizes())
    must_run(size, [&](World& world, int rank) {
      for (int number = 0; number < kDTypes; ++number) {
        const auto dtype = static_cast<DType>(number);
        if (dtype == DType::Bool) continue;
        for (const ReduceOp op : kOps) {
          const Reduction reduction{op, 1, 1, op == ReduceOp::Average ? size : 1};
          reduce_pieces(world, rank, size, dtype, reduction, {17}, false);
          reduce_pieces(world, rank, size, dtype, reduction, {1, 0, 140'001, 5}, true);
        }
        reduce_pieces(world, rank, size, dtype, {ReduceOp::Sum, 2, 3, 1}, {9, 70'000}, false);
      }
    });
}

void bools_nans_and_wide_sums_of_halves() {
  must_run(3, [](World& world, int rank) {
    const std::byte truth[3] = {std::byte{static_cast<unsigned char>(rank == 1 ? 7 : 0)}, std::byte{2}, std::byte{0}};
    std::byte any[3];
    std::byte all[3];
    const Piece either{truth, any, 3};
    const Piece both{truth, all, 3};
    world.allreduce({&either, 1}, DType::Bool, {ReduceOp::Sum});
    world.allreduce({&both, 1}, DType::Bool, {ReduceOp::Min});
    check::that(any[0] == std::byte{1} && any[1] == std::byte{1} && any[2] == std::byte{0}, "or");
    check::that(all[0] == std::byte{0} && all[1] == std::byte{1} && all[2] == std::byte{0}, "and");

    float least = rank == 1 ? std::numeric_limits<float>::quiet_NaN() : 1.0F;
    const Piece number{reinterpret_cast<std::byte*>(&least), reinterpret_cast<std::byte*>(&least), sizeof least};
    world.allreduce({&number, 1}, DType::Float32, {ReduceOp::Min});
    check::that(std::isnan(least), "the minimum of a NaN is NaN");

    // 60000 three times: the sum is beyond float16, the average is not.
    uint16_t half = fp32_to_fp16(60000.0F);
    const Piece halves{reinterpret_cast<std::byte*>(&half), reinterpret_cast<std::byte*>(&half), sizeof half};
    world.allreduce({&halves, 1}, DType::Float16, {ReduceOp::Average, 1, 1, 3});
    check::equal(half, fp32_to_fp16(60000.0F));
  });
}

void movement() {
  for (const int size : sizes())
    must_run(size, [&](World& world, int rank) {
      const auto ranks = static_cast<size_t>(size);
      const Elements numbers(DType::Int32);
      for (const size_t rows : {0, 1, 40'000}) {
        const auto mine = numbers.fill(rank, 0, rows * static_cast<size_t>(rank));
        std::vector<size_t> bytes;
        std::vector<std::vector<std::byte>> apart;
        std::vector<std::byte*> out;
        for (size_t peer = 0; peer < ranks; ++peer) bytes.push_back(rows * peer * 4);
        for (const size_t each : bytes) out.push_back(apart.emplace_back(each).data());
        world.allgather(mine.data(), out, bytes);
        for (size_t peer = 0; peer < ranks; ++peer)
          check::that(apart[peer] == numbers.fill(static_cast<int>(peer), 0, rows * peer), "gathered");

        for (int root = 0; root < size; ++root) {
          const auto small = numbers.fill(rank, 0, 3);
          const auto large = numbers.fill(rank, 3, rows * 4);
          std::vector<std::byte> first(small.size());
          std::vector<std::byte> second(large.size());
          const Piece pieces[] = {{small.data(), first.data(), small.size()},
                                  {large.data(), second.data(), large.size()}};
          world.broadcast(pieces, root);
          check::that(first == numbers.fill(root, 0, 3) && second == numbers.fill(root, 3, rows * 4), "broadcast");
        }
      }
      int asked = 0;
      const auto share = [&asked](int from, int to) {
        ++asked;
        return static_cast<size_t>(from + 2 * to) * 4;
      };
      std::vector<std::vector<std::byte>> sent, received;
      std::vector<const std::byte*> in;
      std::vector<std::byte*> out;
      for (int peer = 0; peer < size; ++peer) {
        in.push_back(sent.emplace_back(numbers.fill(rank, 0, share(rank, peer) / 4)).data());
        out.push_back(received.emplace_back(share(peer, rank)).data());
      }
      asked = 0;
      world.alltoall(in, out, share);
      check::that(asked <= 2 * size, "only the rank's own shares count");
      for (int peer = 0; peer < size; ++peer)
        check::that(received[static_cast<size_t>(peer)] == numbers.fill(peer, 0, share(peer, rank) / 4), "exchanged");
      meet(world);
    });
}

void reducescatter_of_unequal_shares() {
  for (const int size : sizes())
    must_run(size, [&](World& world, int rank) {
      for (const size_t rows : {1, 5, 100'000}) {
        std::vector<size_t> counts;
        for (int owner = 0; owner < size; ++owner) counts.push_back(owner == 1 ? 0 : rows + static_cast<size_t>(owner));
        const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
        const auto at = counts.begin() + rank;
        const size_t first = std::accumulate(counts.begin(), at, size_t{0});
        for (const DType dtype : {DType::Float32, DType::BFloat16, DType::Int64}) {
          const auto in = Elements(dtype).fill(rank, 0, total);
          std::vector<std::byte> out(*at * size_of(dtype));
          const Reduction reduction{ReduceOp::Average, 1, 1, size};
          world.reducescatter(in.data(), out.data(), counts, dtype, reduction);
          check::that(out == Elements(dtype).reduced(size, first, *at, reduction), "share");
        }
      }
    });
}

void threads_that_mpi_refuses() {
  stand_in().start(1, 1);
  stand_in().take_rank(0);
  const auto error = check::thrown<Error>([] { const MpiComm comm(stand_in().loaded, {0}); });
  check::that(error.kind == ErrorKind::Invalid && error.reason.find("MPI_THREAD_MULTIPLE") != std::string::npos,
              "names the level", error.what());
}

/// The last test: MPI is not used any more afterwards.
void waits_that_end() {
  const auto late =
      run(2, [](World& world, int rank) { rank == 0 ? meet(world) : void(); }, std::chrono::milliseconds(100));
  check::that(late[0] && late[0]->kind == ErrorKind::Timeout, "the guard ends a wait");
  check::that(MpiComm::has_abandoned(), "MPI is not used any more");
  const auto after = run(1, [](World& world, int /*rank*/) { meet(world); });
  check::that(after[0] && after[0]->kind == ErrorKind::Fabric, "nor given a new communicator");
}

void an_error_of_mpi() {
  const auto errors = run(2, [](World& world, int rank) {
    meet(world);
    if (rank == 0) stand_in().fail(17);
    meet(world);
  });
  for (const auto& error : errors)
    check::that(error && error->kind == ErrorKind::Fabric && error->reason == "MPI_Test failed: stand-in error 17",
                "the words of MPI", error ? error->what() : "no error");
}

}  // namespace

int main(int count, char** arguments) {
  // Errors of MPI end its use in a process, so each has a process of its own.
  const std::string part = count > 1 ? arguments[1] : "";
  if (part == "late") waits_that_end();
  else if (part == "fails") an_error_of_mpi();
  else {
    allreduce_of_every_type();
    bools_nans_and_wide_sums_of_halves();
    movement();
    reducescatter_of_unequal_shares();
    threads_that_mpi_refuses();
  }
  return check::report();
}
