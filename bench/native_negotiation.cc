// Measures the cost of negotiation by the number of ranks. It runs the pure parts of the engine (the tree of control
// connections, a collector at each rank, the negotiator, the encoding of messages) for all ranks in one thread, without
// sockets, and with no clock but that of the measurement. Messages and bytes are counted as they are encoded.
//
// usage: native_negotiation [tensors=200] [ranks=8,64,512,4096] [ranks per host=8]
// In the step "first" each rank sends full requests, in "later" it sends numbers, each rank in its own order. Messages
// and bytes are those that the busiest rank sends and receives; the last two columns are means of all ranks. The time
// is the coordinator's. Each rank sends one message; an engine whose caller submits slowly sends more.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "engine/collector.h"
#include "engine/negotiator.h"
#include "engine/tree.h"
#include "engine/wire.h"

using namespace farandole;

namespace {

constexpr int kLaterSteps = 5;
constexpr int kDegree = 8;  // CONTROL_DEGREE in topology.py
constexpr double kMergeWait = 1;

// Traffic of one rank.
struct Traffic {
  size_t messages = 0;
  size_t bytes_up = 0;
  size_t bytes_down = 0;
};

struct Step {
  Traffic busiest;          // maximum over all ranks, for each figure
  double messages = 0;      // mean
  double bytes = 0;         // mean, up and down
  double milliseconds = 0;  // of the coordinator, from its children's messages to the plan
};

std::vector<int> parents_of(int ranks, int per_host) {
  std::vector<int> parents;
  for (int rank = 0; rank < ranks; ++rank) {
    const int host = rank / per_host;
    if (rank == 0) parents.push_back(-1);
    else if (rank % per_host != 0) parents.push_back(host * per_host);
    else parents.push_back((host - 1) / kDegree * per_host);
  }
  return parents;
}

Request request_of(int tensor) {
  Request request;
  request.name = "allreduce.layer" + std::to_string(tensor) + ".weight.grad";
  request.kind = Kind::Allreduce;
  request.dtype = DType::Float32;
  request.cacheable = true;
  request.shape = {1000};
  return request;
}

class World {
 public:
  World(int ranks, int per_host) : ranks_(ranks), tree_(parents_of(ranks, per_host)), negotiator_({.size = ranks}) {
    for (int rank = 0; rank < ranks; ++rank) collectors_.emplace_back(rank, tree_.children(rank), kMergeWait);
  }

  // Simulates a step in which each rank requests `batch`, in its own order; sets `plan`.
  Step step(RequestBatch batch, double now, Plan& plan) {
    traffic_.assign(static_cast<size_t>(ranks_), {});
    std::vector<std::vector<Bytes>> heard(static_cast<size_t>(ranks_));  // messages by receiving parent
    std::vector<std::vector<int>> from(static_cast<size_t>(ranks_));
    // Children have higher ranks than their parents, so that a rank has all messages of its children.
    for (int rank = ranks_ - 1; rank > 0; --rank) {
      const auto at = static_cast<size_t>(rank);
      std::shuffle(batch.begin(), batch.end(), random_);
      collectors_[at].add(batch, now);
      for (size_t i = 0; i < heard[at].size(); ++i)
        collectors_[at].add(from[at][i], std::get<CollectedRequests>(decode(body_of(heard[at][i]))), now);
      heard[at].clear();
      const auto parent = static_cast<size_t>(tree_.parent(rank));
      heard[parent].emplace_back();
      from[parent].push_back(rank);
      encode(collectors_[at].drain(now), heard[parent].back());
      count(rank, heard[parent].back(), &Traffic::bytes_up);
    }
    Step step;
    const uint64_t begin = now_ns();
    for (size_t i = 0; i < heard[0].size(); ++i)
      deliver(std::get<CollectedRequests>(decode(body_of(heard[0][i]))), from[0][i], tree_, negotiator_, now);
    deliver(own_of(batch), 0, tree_, negotiator_, now);
    plan = negotiator_.decide(now);
    Bytes answer;
    encode(plan, answer);
    step.milliseconds = static_cast<double>(now_ns() - begin) / 1e6;
    for (int rank = 1; rank < ranks_; ++rank) {
      count(rank, answer, &Traffic::bytes_down);
      collectors_[static_cast<size_t>(rank)].learn(plan);
    }
    sum_up(step);
    return step;
  }

  [[nodiscard]] bool waits() const { return negotiator_.waiting() != 0; }

 private:
  static std::span<const std::byte> body_of(const Bytes& frame) { return std::span(frame).subspan(kFrameHeader); }

  static CollectedRequests own_of(const RequestBatch& batch) {
    CollectedRequests own;
    for (const auto& wanted : batch) {
      if (const auto* id = std::get_if<uint32_t>(&wanted)) own.emplace_back(NumberRange{0, false, *id, 1});
      else own.emplace_back(FullRequest{0, std::get<Request>(wanted)});
    }
    return own;
  }

  // Counts `frame`, sent between `rank` and its parent, for both.
  void count(int rank, const Bytes& frame, size_t Traffic::* direction) {
    for (const int end : {rank, tree_.parent(rank)}) {
      ++traffic_[static_cast<size_t>(end)].messages;
      traffic_[static_cast<size_t>(end)].*direction += frame.size();
    }
  }

  void sum_up(Step& step) const {
    for (const Traffic& each : traffic_) {
      step.busiest.messages = std::max(step.busiest.messages, each.messages);
      step.busiest.bytes_up = std::max(step.busiest.bytes_up, each.bytes_up);
      step.busiest.bytes_down = std::max(step.busiest.bytes_down, each.bytes_down);
      step.messages += static_cast<double>(each.messages) / ranks_;
      step.bytes += static_cast<double>(each.bytes_up + each.bytes_down) / ranks_;
    }
  }

  int ranks_;
  Tree tree_;
  Negotiator negotiator_;
  std::vector<Collector> collectors_;
  std::vector<Traffic> traffic_;
  std::mt19937 random_{1};
};

// Ascending.
std::vector<uint32_t> numbers_in(const Plan& plan) {
  std::vector<uint32_t> numbers;
  for (const auto& item : plan)
    for (const Entry& entry : std::get<Bucket>(item).entries) numbers.push_back(entry.id);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

void print(int ranks, const char* which, const Step& step, int tensors) {
  std::printf("%8d %8s %10zu %10zu %10zu %14.3f %14.1f %14.2f %14.1f\n", ranks, which, step.busiest.messages,
              step.busiest.bytes_up, step.busiest.bytes_down, step.milliseconds,
              step.milliseconds * 1e6 / ranks / tensors, step.messages, step.bytes);
}

// Returns whether every tensor was agreed on in both kinds of step.
bool simulate(int ranks, int tensors, int per_host) {
  World world(ranks, per_host);
  RequestBatch batch;
  for (int tensor = 0; tensor < tensors; ++tensor) batch.emplace_back(request_of(tensor));
  Plan plan;
  print(ranks, "first", world.step(batch, 0, plan), tensors);
  const std::vector<uint32_t> numbers = numbers_in(plan);
  if (numbers.size() != static_cast<size_t>(tensors)) return false;
  std::vector<Step> later;
  for (int number = 1; number <= kLaterSteps; ++number) {
    later.push_back(world.step(RequestBatch(numbers.begin(), numbers.end()), number, plan));
    if (numbers_in(plan) != numbers || world.waits()) return false;
  }
  std::sort(later.begin(), later.end(), [](const Step& a, const Step& b) { return a.milliseconds < b.milliseconds; });
  print(ranks, "later", later[kLaterSteps / 2], tensors);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int tensors = argc > 1 ? std::max(1, std::atoi(argv[1])) : 200;
  std::istringstream sizes(argc > 2 ? argv[2] : "8,64,512,4096");
  const int per_host = argc > 3 ? std::max(1, std::atoi(argv[3])) : 8;
  std::printf("%8s %8s %10s %10s %10s %14s %14s %14s %14s\n", "ranks", "step", "messages", "bytes up", "bytes down",
              "coordinator ms", "ns/rank/tensor", "mean messages", "mean bytes");
  for (std::string size; std::getline(sizes, size, ',');) {
    if (!simulate(std::max(1, std::atoi(size.c_str())), tensors, per_host)) {
      std::fprintf(stderr, "%s ranks did not agree\n", size.c_str());
      return 1;
    }
  }
  return 0;
}
