// What does agreement cost, and does it grow with the number of ranks? The pure negotiator and the wire's encoding,
// with all ranks simulated in one thread: no sockets, no clocks but the one that measures.
//
// usage: native_negotiation [tensors=200] [ranks=8,64,512,4096]
// "first" is the step in which every rank spells its requests out, "later" one in which it asks by number. Bytes and
// messages are one rank's, to and from the coordinator; the time is the coordinator's, for all ranks. That a rank asks
// in one message and hears in one is assumed here: an engine whose caller submits slowly sends more.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "engine/negotiator.h"
#include "engine/wire.h"

using namespace farandole;

namespace {

constexpr int kLaterSteps = 5;

struct Step {
  size_t messages = 0;      // of one rank, sent and received
  size_t bytes_up = 0;      // from one rank to the coordinator
  size_t bytes_down = 0;    // from the coordinator to one rank
  double milliseconds = 0;  // the coordinator's, decoding what all ranks sent and encoding the plan
};

Request request_of(int tensor) {
  Request request;
  request.name = "allreduce.layer" + std::to_string(tensor) + ".weight.grad";
  request.kind = Kind::Allreduce;
  request.dtype = DType::Float32;
  request.cacheable = true;
  request.shape = {1000};
  return request;
}

// One step: every rank sends one message with all its requests, the coordinator answers each with one plan.
Step step(Negotiator& negotiator, int ranks, const Asking& asking, double now, Plan& plan) {
  Bytes frame;
  encode(asking, frame);
  const uint64_t begin = now_ns();
  for (int rank = 0; rank < ranks; ++rank) {
    const Message heard = decode(std::span(frame).subspan(kFrameHeader));
    for (const auto& each : std::get<Asking>(heard))
      std::visit([&](const auto& wanted) { negotiator.ask(rank, wanted, now); }, each);
  }
  plan = negotiator.decide(now);
  Bytes answer;
  encode(plan, answer);
  return {2, frame.size(), answer.size(), static_cast<double>(now_ns() - begin) / 1e6};
}

Asking numbers_in(const Plan& plan) {
  Asking asking;
  for (const auto& item : plan)
    for (const Entry& entry : std::get<Bundle>(item).entries) asking.emplace_back(entry.id);
  return asking;
}

void print(int ranks, const char* which, const Step& step, int tensors) {
  std::printf("%8d %8s %10zu %10zu %10zu %14.3f %14.1f\n", ranks, which, step.messages, step.bytes_up, step.bytes_down,
              step.milliseconds, step.milliseconds * 1e6 / ranks / tensors);
}

// Returns whether every tensor was agreed on in both kinds of step.
bool simulate(int ranks, int tensors) {
  Negotiator negotiator({.size = ranks});
  Asking asking;
  for (int tensor = 0; tensor < tensors; ++tensor) asking.emplace_back(request_of(tensor));
  Plan plan;
  print(ranks, "first", step(negotiator, ranks, asking, 0, plan), tensors);
  const Asking numbers = numbers_in(plan);
  if (numbers.size() != static_cast<size_t>(tensors)) return false;
  std::vector<Step> later;
  for (int number = 1; number <= kLaterSteps; ++number) {
    later.push_back(step(negotiator, ranks, numbers, number, plan));
    if (numbers_in(plan) != numbers || negotiator.waiting() != 0) return false;
  }
  std::sort(later.begin(), later.end(), [](const Step& a, const Step& b) { return a.milliseconds < b.milliseconds; });
  print(ranks, "later", later[kLaterSteps / 2], tensors);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int tensors = argc > 1 ? std::max(1, std::atoi(argv[1])) : 200;
  std::istringstream sizes(argc > 2 ? argv[2] : "8,64,512,4096");
  std::printf("%8s %8s %10s %10s %10s %14s %14s\n", "ranks", "step", "messages", "bytes up", "bytes down",
              "coordinator ms", "ns/rank/tensor");
  for (std::string size; std::getline(sizes, size, ',');) {
    if (!simulate(std::max(1, std::atoi(size.c_str())), tensors)) {
      std::fprintf(stderr, "%s ranks did not agree\n", size.c_str());
      return 1;
    }
  }
  return 0;
}
