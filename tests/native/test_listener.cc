// Operations without a waiting thread: each listener is called once, on success or failure, and may start more.
#include <atomic>
#include <latch>
#include <memory>

#include "check.h"
#include "engine_ranks.h"

using namespace ranks;

namespace {

const std::vector<std::vector<int>> kWorlds = {{0}, {0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 1, 1}};

// Operations that each start the next one on completion, `left` times.
struct Chain {
  Engine& engine;
  std::string name;
  int left;
  std::latch& over;
  std::vector<float> values = std::vector<float>(100, 1.0f);
  std::atomic<int> heard{0}, failed{0};

  void start() {
    values.assign(values.size(), 1.0f);
    const OperationPtr next = sum(name, values);
    next->listener = {&Chain::done, nullptr, this};
    submit(engine, next);
  }

  static void done(void* cookie, farandole::Operation& operation) noexcept {
    auto& chain = *static_cast<Chain*>(cookie);
    check::that(operation.done(), "it is done when its listener hears of it");
    ++chain.heard;
    if (operation.error) ++chain.failed;
    else check::equal(chain.values[99], static_cast<float>(chain.engine.size()));
    if (--chain.left > 0) chain.start();
    else chain.over.count_down();
  }
};

// Also while another thread drives, for its own operations.
void listeners_ask_again(Engine& engine) {
  constexpr int kChains = 4;
  constexpr int kLength = 50;
  std::latch over(kChains);
  std::vector<std::unique_ptr<Chain>> chains;
  for (int i = 0; i < kChains; ++i)
    chains.push_back(std::make_unique<Chain>(engine, "chain " + std::to_string(i), kLength, over));
  for (const auto& chain : chains) chain->start();
  std::vector<float> values(3);
  for (int i = 0; i < kLength; ++i) {
    values.assign(3, 1.0f);
    run_now(engine, sum("waited for", values));
  }
  over.wait();
  for (const auto& chain : chains) {
    check::equal(chain->heard.load(), kLength);
    check::equal(chain->failed.load(), 0);
  }
}

// A listener that waits for an operation does not block others.
void listener_waits(Engine& engine) {
  struct Waiting {
    Engine& engine;
    std::latch over{1};
  } waiting{engine};
  const OperationPtr first = operation(Kind::Barrier, "first", DType::UInt8, {}, nullptr, nullptr);
  first->listener.cookie = &waiting;
  first->listener.done = [](void* cookie, farandole::Operation&) noexcept {
    auto& self = *static_cast<Waiting*>(cookie);
    std::vector<float> values(7, 2.0f);
    run_now(self.engine, sum("inner", values));
    check::equal(values[6], static_cast<float>(2 * self.engine.size()));
    self.over.count_down();
  };
  submit(engine, first);
  waiting.over.wait();
}

// A result sized by the plan is written to the listener's memory.
void results_are_written_where_they_are_wanted(Engine& engine) {
  struct Room {
    std::vector<int> rows;
    std::latch over{1};
  } room;
  std::vector<int> mine(static_cast<size_t>(engine.rank() + 1), engine.rank());
  const OperationPtr gather =
      operation(Kind::Allgather, "gather", DType::Int32, {static_cast<int64_t>(mine.size())}, mine.data(), nullptr);
  gather->listener.cookie = &room;
  gather->listener.allocate = [](void* cookie, farandole::Operation& operation, size_t bytes) noexcept {
    check::equal(bytes, static_cast<size_t>(operation.result_shape[0]) * sizeof(int));
    auto& rows = static_cast<Room*>(cookie)->rows;
    rows.resize(bytes / sizeof(int));
    return reinterpret_cast<std::byte*>(rows.data());
  };
  gather->listener.done = [](void* cookie, farandole::Operation& operation) noexcept {
    check::that(!operation.error && !operation.result, "the engine has allocated nothing");
    static_cast<Room*>(cookie)->over.count_down();
  };
  submit(engine, gather);
  room.over.wait();
  std::vector<int> expected;
  for (int rank = 0; rank < engine.size(); ++rank) expected.insert(expected.end(), static_cast<size_t>(rank + 1), rank);
  check::that(room.rows == expected, "the rows of all ranks, in order");
}

void failures_are_told(Engine& engine) {
  if (engine.size() == 1) return;
  std::latch over(1);
  Chain differs{engine, "differs", 1, over};
  differs.values.resize(static_cast<size_t>(100 + engine.rank()));
  differs.start();
  over.wait();
  check::equal(differs.failed.load(), 1);

  // Requested by one rank only; then the job ends.
  std::latch end(1);
  Chain never{engine, "never " + std::to_string(engine.rank()), 1, end};
  bool taken = true;
  try {
    never.start();
  } catch (const Error&) {
    taken = false;  // others were faster and have left
  }
  engine.shutdown();
  check::equal(never.heard.load(), taken ? 1 : 0);
  check::equal(never.failed.load(), taken ? 1 : 0);
}

}  // namespace

int main() {
  for (const auto& hosts : kWorlds) {
    for (const auto& body :
         {&listeners_ask_again, &listener_waits, &results_are_written_where_they_are_wanted, &failures_are_told})
      for (const std::string& problem : run(hosts, *body)) check::equal(problem, "");
  }
  return check::report();
}
