// Agreement in the lane is all or nothing: either every rank runs the operation there, or none does.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/lane.h"
#include "transport/segment.h"

using namespace farandole;

namespace {

constexpr int kSteps = 300;
constexpr size_t kPayloads[] = {0, 8, 1000};  // none, beside the round's word, in a slot

std::byte mark(size_t step, int rank) { return static_cast<std::byte>(7 * step + static_cast<size_t>(rank)); }

LaneAttempt attempt(int rank, size_t step, bool busy) {
  const size_t payload = kPayloads[step % 3];
  LaneAttempt made{static_cast<uint32_t>(step % 3), static_cast<uint32_t>(step), payload, {}, {}, {}};
  made.load = [=](std::byte* to) { std::memset(to, static_cast<int>(mark(step, rank)), payload); };
  made.interrupted = [busy] { return busy; };
  made.before_wait = [] {};
  return made;
}

LaneAttempt empty(uint32_t number, uint32_t instance) {
  return {number, instance, 0, {}, [] { return false; }, [] {}};
}

// The shared state of one operation, in place of a coordinator and the collective.
struct Step {
  std::atomic<int> asked{0};
  std::atomic<int> agreed{0};
};

// Waits; the limit is that of ctest.
void await(const std::atomic<int>& count, int target) {
  while (count.load() < target) std::this_thread::yield();
}

class Ranks {
 public:
  Ranks(int size, unsigned sync_percent, std::chrono::microseconds spin)
      : size_(size),
        sync_percent_(sync_percent),
        spin_(spin),
        segment_(Segment::create(size, 8192, false)),
        steps_(kSteps) {}

  void run() {
    {
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < size_; ++rank) threads.emplace_back([this, rank] { walk(rank); });
    }
    for (size_t k = 0; k < steps_.size(); ++k) {
      const int agreed = steps_[k].agreed.load();
      const std::string context =
          std::to_string(agreed) + " of " + std::to_string(size_) + " ranks in step " + std::to_string(k);
      check::that(agreed == 0 || agreed == size_, "all ranks or none agreed", context);
      check::equal(steps_[k].asked.load(), agreed == 0 ? size_ : 0, context);
      check::that(size_ > 1 || sync_percent_ < 100 || busy_ > 0 || agreed == 1, "one rank agrees with itself", context);
    }
  }

 private:
  void walk(int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    Lane lane(*segment_, rank, WaitPolicy{spin_});
    for (size_t k = 0; k < steps_.size(); ++k) {
      Step& step = steps_[k];
      const bool sync = random() % 100 < sync_percent_;
      // Sometimes a rank is interrupted or late.
      const bool busy = random() % 20 == 0;
      if (busy) ++busy_;
      if (random() % 30 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      if (sync && lane.agree(attempt(rank, k, busy))) {
        const size_t bytes = kPayloads[k % 3];
        for (int peer = 0; peer < size_ && bytes > 0; ++peer) {
          const std::byte* brought = lane.payload(peer, bytes);
          check::that(brought[0] == mark(k, peer) && brought[bytes - 1] == mark(k, peer),
                      "the payload of each is here");
        }
        step.agreed.fetch_add(1);
        await(step.agreed, size_);  // the operation synchronizes all ranks
        continue;
      }
      lane.leave(static_cast<uint32_t>(k));
      step.asked.fetch_add(1);
      await(step.asked, size_);
    }
  }

  int size_;
  unsigned sync_percent_;
  std::chrono::microseconds spin_;
  std::shared_ptr<Segment> segment_;
  std::vector<Step> steps_;
  std::atomic<int> busy_{0};
};

void test_all_or_none() {
  for (const int size : {1, 2, 3, 4})
    for (const unsigned sync_percent : {100U, 90U, 50U})
      for (const int spin_us : {0, 100}) Ranks(size, sync_percent, std::chrono::microseconds(spin_us)).run();
}

// Different numbers, or a number too large for the lane, send both ranks to the coordinator.
void test_other_numbers() {
  const std::shared_ptr<Segment> segment = Segment::create(2, 8192, false);
  Lane first(*segment, 0, WaitPolicy{});
  Lane second(*segment, 1, WaitPolicy{});
  CHECK(!first.agree(empty(LaneRounds::kMostNumbers, 0)));
  CHECK(!first.agree(empty(7, 0)));   // no other rank arrives
  CHECK(!second.agree(empty(8, 0)));  // the other rank has spoiled the round: fails at once
  std::atomic<int> agreed{0};
  {
    std::jthread other([&] { agreed += first.agree(empty(1, 5)) ? 1 : 0; });
    agreed += second.agree(empty(2, 5)) ? 1 : 0;
  }
  CHECK_EQ(agreed.load(), 0);
}

// A rank that asks the coordinator will not arrive, also for those that come to the lane after it has left.
void test_no_wait_for_a_rank_that_asks() {
  const std::shared_ptr<Segment> segment = Segment::create(2, 8192, false);
  Lane first(*segment, 0, WaitPolicy{});
  Lane second(*segment, 1, WaitPolicy{});
  int looks = 0;
  const auto looks_of_first = [&](uint32_t instance) {
    looks = 0;
    LaneAttempt made = empty(1, instance);
    made.interrupted = [&looks] { return ++looks > 1; };
    CHECK(!first.agree(made));
    return looks;
  };
  CHECK_EQ(looks_of_first(3), 2);  // it waits until it is interrupted
  second.leave(3);
  CHECK_EQ(looks_of_first(3), 1);
  CHECK_EQ(looks_of_first(4), 2);  // what the other rank asked for may have run
  second.keep_asking(4);
  CHECK_EQ(looks_of_first(4), 1);
}

}  // namespace

int main() {
  test_all_or_none();
  test_other_numbers();
  test_no_wait_for_a_rank_that_asks();
  return check::report();
}
