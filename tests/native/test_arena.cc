// Registered buffers: allocation and release in an arena, and allreduces in place.
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collectives/shm_collectives.h"
#include "engine_ranks.h"
#include "shm_ranks.h"
#include "transport/arena.h"

using namespace farandole;

namespace {

constexpr size_t MiB = size_t{1} << 20;

size_t memory_of(const Segment& segment) {
  struct stat status{};
  fstat(segment.fd(), &status);
  return static_cast<size_t>(status.st_blocks) * 512;
}

void test_taking_and_giving_back() {
  const auto segment = Segment::create(2, 8192, false);
  const auto arena = Arena::make(segment, 1);
  const size_t before = memory_of(*segment);
  auto first = arena->take(3 * MiB);
  auto second = arena->take(1);
  auto third = arena->take(MiB);
  CHECK_EQ(arena->used(), 4 * MiB + 4096);
  std::memset(first.get(), 1, 3 * MiB);
  std::memset(third.get(), 3, MiB);
  CHECK(memory_of(*segment) >= before + 4 * MiB);
  std::byte* const place = first.get();
  first.reset();
  second.reset();
  // Both gaps became one, and the next buffer goes there, zeroed.
  auto fourth = arena->take(3 * MiB + 4096);
  CHECK(fourth.get() == place);
  CHECK(fourth.get()[0] == std::byte{0} && fourth.get()[3 * MiB - 1] == std::byte{0});
  CHECK(third.get()[MiB - 1] == std::byte{3});
  fourth.reset();
  third.reset();
  CHECK_EQ(arena->used(), size_t{0});
  CHECK(memory_of(*segment) < before + MiB);
  CHECK(arena->take(0) != nullptr);
}

void test_exhausted() {
  const auto arena = Arena::make(Segment::create(1, 8192, false), 0);
  CHECK(CHECK_THROWS(Error, arena->take(Segment::kArenaBytes + 1)).kind == ErrorKind::Invalid);
  const auto most = arena->take(Segment::kArenaBytes - MiB);  // unwritten, so it takes no memory
  const Error error = CHECK_THROWS(Error, arena->take(2 * MiB));
  CHECK(error.kind == ErrorKind::Invalid && std::string(error.what()).find("in use") != std::string::npos);
  const auto rest = arena->take(MiB);
  CHECK_EQ(arena->used(), Segment::kArenaBytes);
}

void test_a_buffer_outlives_everything() {
  auto segment = Segment::create(1, 8192, false);
  auto arena = Arena::make(segment, 0);
  auto buffer = arena->take(MiB);
  segment.reset();
  arena.reset();
  std::memset(buffer.get(), 7, MiB);
  CHECK(buffer.get()[MiB - 1] == std::byte{7});
}

void test_many_threads() {
  const auto arena = Arena::make(Segment::create(1, 8192, false), 0);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&arena, t] {
      std::mt19937 random(t);
      std::vector<std::shared_ptr<std::byte>> held(4);
      for (int i = 0; i < 200; ++i) {
        auto& one = held[random() % held.size()];
        check::that(!one || *one == std::byte(t), "nobody else has this memory");
        one = arena->take(random() % 20'000 + 1);
        *one = std::byte(t);
      }
    });
  threads.clear();
  CHECK_EQ(arena->used(), size_t{0});
}

// In every second step all ranks' buffers are registered; otherwise one rank's buffer is not, or is not in place.
void reduce_where_they_lie(int size) {
  const auto segment = Segment::create(size, 8192, false);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      ranks::Limit limit;
      SharedMesh mesh(segment, rank, ranks::all_ranks(size), limit, {std::chrono::microseconds(5)});
      const auto arena = Arena::make(segment, rank);
      for (int step = 0; step < 40; ++step) {
        const size_t count = 3000 + 977 * static_cast<size_t>(step % 20);
        const std::vector<ranks::Bytes> all = ranks::inputs(DType::Float32, count, size, step);
        const bool registered = step % 2 == 0 || rank != step % size;
        // Two pieces, at places that differ between ranks.
        const size_t head = count / 3 * 4;
        ranks::Bytes plain(4 * count);
        const auto gap = arena->take(static_cast<size_t>(1 + rank) * 5000);
        const auto one = arena->take(4 * count);
        const auto two = arena->take(4 * count);
        std::byte* at[] = {one.get(), registered ? two.get() : plain.data()};
        const ranks::Bytes& mine = all[static_cast<size_t>(rank)];
        std::memcpy(at[0], mine.data(), head);
        std::memcpy(at[1], mine.data() + head, mine.size() - head);
        const Piece pieces[] = {{at[0], at[0], head}, {at[0], at[0], 0}, {at[1], at[1], mine.size() - head}};
        const Reduction reduction{.op = ReduceOp::Average, .divisor = size};
        shm_allreduce(mesh, pieces, DType::Float32, reduction);
        std::vector<const void*> sources;
        for (const ranks::Bytes& each : all) sources.push_back(each.data());
        ranks::Bytes expected(mine.size());
        reduce(DType::Float32, reduction, expected.data(), sources, count);
        check::that(std::memcmp(at[0], expected.data(), head) == 0 &&
                        std::memcmp(at[1], expected.data() + head, mine.size() - head) == 0,
                    "the sum of all ranks", "step " + std::to_string(step) + ", rank " + std::to_string(rank));
      }
    });
}

void test_a_limit_on_address_space() {
  const auto segment = Segment::create(1, 8192, false);
  const pid_t child = fork();  // the limit is for a process
  if (child == 0) {
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t most = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + (size_t{1} << 30);
    const rlimit limit{most, most};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    try {
      static_cast<void>(segment->arena(0));
    } catch (const Error& error) {
      _exit(error.kind == ErrorKind::Invalid && std::string(error.what()).find("ulimit -v") != std::string::npos ? 0
                                                                                                                 : 1);
    }
    _exit(3);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

void test_engine_hands_them_out(const std::vector<int>& hosts) {
  std::vector<std::shared_ptr<std::byte>> left(hosts.size());
  const auto problems = ranks::run(hosts, [&](Engine& engine) {
    const size_t count = 50'000;
    const auto buffer = engine.shared_buffer(4 * count);
    auto* values = reinterpret_cast<float*>(buffer.get());
    for (int step = 0; step < 3; ++step) {
      std::fill_n(values, count, static_cast<float>(engine.rank() + step));
      const auto n = static_cast<int64_t>(count);
      ranks::run_now(engine, ranks::operation(Kind::Allreduce, "shared", DType::Float32, {n}, values, values));
      const int size = engine.size();
      const auto sum = static_cast<float>(size * (size - 1) / 2 + size * step);
      CHECK(values[0] == sum && values[count - 1] == sum);
    }
    left[static_cast<size_t>(engine.rank())] = buffer;
    engine.shutdown();
    CHECK(CHECK_THROWS(Error, engine.shared_buffer(1)).kind == ErrorKind::Closed);
  });
  for (const std::string& problem : problems) CHECK_EQ(problem, std::string());
  for (const auto& buffer : left) CHECK(*buffer == *left[0]);
}

}  // namespace

int main() {
  test_taking_and_giving_back();
  test_exhausted();
  test_a_buffer_outlives_everything();
  test_many_threads();
  test_a_limit_on_address_space();
  for (int size = 1; size <= 5; ++size) reduce_where_they_lie(size);
  test_engine_hands_them_out({0});
  test_engine_hands_them_out({0, 0, 0});
  test_engine_hands_them_out({0, 0, 1});
  return check::report();
}
