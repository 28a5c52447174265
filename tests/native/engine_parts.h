// The parts of one rank's engine, joined without threads. The test decides when each of them acts.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "engine/executor.h"
#include "engine_ranks.h"

namespace parts {

// Scripted work.
struct ScriptedWork : farandole::Work {
  std::function<bool()> on_progress = [] { return false; };
  std::atomic<int> checks{0};
  std::atomic<int> armed{0};

  bool progress() noexcept override { return on_progress(); }
  void check_peers() noexcept override { ++checks; }
  void arm_doorbell() noexcept override { ++armed; }
};

struct Parts {
  explicit Parts(farandole::Wiring given, farandole::EngineOptions chosen = ranks::options())
      : wiring(std::move(given)),
        options(chosen),
        control(wiring, options, pending, trace),
        driver(wiring, options.spin, control.has_remote_peers(), pending, work),
        failures(wiring, options, pending, control, driver),
        executor(wiring, options, pending, trace, driver, failures) {}

  void add(const farandole::OperationPtr& operation) { pending.add({&operation, 1}); }

  farandole::Wiring wiring;
  farandole::EngineOptions options;
  farandole::Trace trace;
  farandole::Pending pending;
  ScriptedWork work;
  farandole::ControlTree control;
  farandole::Driver driver;
  farandole::FailureDetector failures;
  farandole::Executor executor;
};

// One rank of each host in `hosts`, in order.
inline std::vector<std::unique_ptr<Parts>> make(const std::vector<int>& hosts,
                                                farandole::EngineOptions options = ranks::options()) {
  std::vector<std::unique_ptr<Parts>> made;
  for (farandole::Wiring& wiring : ranks::wire(hosts))
    made.push_back(std::make_unique<Parts>(std::move(wiring), options));
  return made;
}

}  // namespace parts
