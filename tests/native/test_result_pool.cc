// Unused results are reused; the pool has a limit, and buffers may outlive it.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/result_pool.h"

using namespace farandole;

namespace {

constexpr size_t MiB = size_t{1} << 20;

void test_reuse() {
  const auto pool = ResultPool::make(16 * MiB);
  const std::byte* first = nullptr;
  {
    const ResultBuffer buffer = pool->take(MiB);
    first = buffer.data();
    CHECK_EQ(pool->kept_bytes(), size_t{0});
  }
  CHECK_EQ(pool->kept_bytes(), MiB);
  {
    const ResultBuffer again = pool->take(MiB - 100);
    CHECK(again.data() == first);
    CHECK(pool->take(MiB).data() != first);  // in use
  }
  CHECK(pool->take(MiB / 4).data() != first);  // more than twice the needed size
  {
    const ResultBuffer small = pool->take(100);
    const ResultBuffer none = pool->take(0);
    CHECK(small.data() != nullptr && none.data() != nullptr);
  }
  pool->close();
  CHECK_EQ(pool->kept_bytes(), size_t{0});
  static_cast<void>(pool->take(MiB));
  CHECK_EQ(pool->kept_bytes(), size_t{0});
}

void test_alignment() {
  const auto pool = ResultPool::make(64 * MiB);
  for (const size_t bytes : {size_t{1}, size_t{63}, size_t{65}, 100'000 + size_t{1}, 5 * MiB + 1}) {
    const ResultBuffer buffer = pool->take(bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % ResultBuffer::kAlignment, uintptr_t{0});
    CHECK(buffer.capacity() >= bytes);
    std::memset(buffer.data(), 1, buffer.capacity());
  }
}

void test_limit() {
  const auto pool = ResultPool::make(4 * MiB);
  {
    std::vector<ResultBuffer> many;
    for (int i = 0; i < 6; ++i) many.push_back(pool->take(MiB));
    static_cast<void>(pool->take(5 * MiB));
    CHECK_EQ(pool->kept_bytes(), size_t{0});  // larger than the limit
  }
  CHECK_EQ(pool->kept_bytes(), 4 * MiB);
  static_cast<void>(pool->take(3 * MiB));  // drops three of them
  CHECK_EQ(pool->kept_bytes(), 4 * MiB);
}

void test_a_result_outlives_its_pool() {
  auto pool = ResultPool::make(16 * MiB);
  std::optional<ResultBuffer> buffer = pool->take(MiB);
  pool.reset();
  std::memset(buffer->data(), 7, buffer->capacity());
  buffer.reset();  // the address sanitizer checks that it is freed once
}

void test_many_threads() {
  const auto pool = ResultPool::make(3 * MiB);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&pool, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        const ResultBuffer buffer = pool->take(random() % MiB);
        std::memset(buffer.data(), static_cast<int>(t), 64);
        std::this_thread::yield();
        check::that(buffer.capacity() < 64 || buffer.data()[63] == std::byte(t), "nobody else has this memory");
      }
    });
  threads.clear();
  CHECK(pool->kept_bytes() <= 3 * MiB);
}

void test_a_forked_child_takes_no_lock() {
  const auto pool = ResultPool::make(16 * MiB);
  std::optional<ResultBuffer> buffer = pool->take(MiB);
  const pid_t child = fork();
  if (child == 0) {
    buffer.reset();
    _exit(pool->kept_bytes() == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
}

}  // namespace

int main() {
  test_reuse();
  test_alignment();
  test_limit();
  test_a_result_outlives_its_pool();
  test_many_threads();
  test_a_forked_child_takes_no_lock();
  return check::report();
}
