// Ranks as threads with an engine each, on one host or on several that are connected by socket pairs.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace ranks {

using farandole::Descriptor;
using farandole::DType;
using farandole::Engine;
using farandole::EngineOptions;
using farandole::Error;
using farandole::Kind;
using farandole::OperationPtr;
using farandole::ReduceOp;
using farandole::Segment;
using farandole::Wiring;

// The tree of control connections: ranks below the first of their host, and these in a tree of `degree` children each.
// (Python builds the tree of real jobs; few children make deep trees of few ranks.)
inline std::vector<int> control_parents(const std::vector<int>& hosts, size_t degree) {
  std::map<int, int> leaders;
  std::vector<int> order;  // of the leaders
  std::vector<int> parents;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    const auto [leader, first] = leaders.try_emplace(hosts[static_cast<size_t>(rank)], rank);
    if (first) order.push_back(rank);
    if (!first) parents.push_back(leader->second);
    else parents.push_back(order.size() == 1 ? -1 : order[(order.size() - 2) / degree]);
  }
  return parents;
}

// hosts[r] is the host of rank r. With `flat`, ranks of a grid are connected to all ranks too.
inline std::vector<Wiring> wire(const std::vector<int>& hosts, size_t degree = 8, bool flat = false,
                                bool transfers = false) {
  const int size = static_cast<int>(hosts.size());
  const std::vector<int> parents = control_parents(hosts, degree);
  std::map<int, std::vector<int>> members;
  for (int rank = 0; rank < size; ++rank) members[hosts[rank]].push_back(rank);
  std::map<int, std::shared_ptr<Segment>> segments;
  for (const auto& [host, local] : members)
    segments[host] =
        Segment::create(static_cast<int>(local.size()), 16 << 10,
                        static_cast<int>(local.size()) < size && (flat || !farandole::grid_of(0, hosts)), transfers);
  std::vector<Wiring> wirings(hosts.size());
  for (int rank = 0; rank < size; ++rank)
    wirings[rank] = {rank, size, members[hosts[rank]], segments[hosts[rank]], {}, parents, hosts};
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      if (hosts[a] == hosts[b]) continue;
      int control[2] = {-1, -1};
      int data[2] = {-1, -1};
      int messages[2] = {-1, -1};
      const bool talk = parents[static_cast<size_t>(b)] == a;
      const std::vector<int> wanted = farandole::data_peers(a, hosts, flat);
      const bool exchange = std::find(wanted.begin(), wanted.end(), b) != wanted.end();
      if ((exchange && socketpair(AF_UNIX, SOCK_STREAM, 0, data) != 0) ||
          (talk && socketpair(AF_UNIX, SOCK_STREAM, 0, control) != 0) ||
          (transfers && socketpair(AF_UNIX, SOCK_STREAM, 0, messages) != 0))
        std::abort();
      wirings[a].remotes.push_back({b, Descriptor(control[0]), Descriptor(data[0]), Descriptor(messages[0])});
      wirings[b].remotes.push_back({a, Descriptor(control[1]), Descriptor(data[1]), Descriptor(messages[1])});
    }
  }
  return wirings;
}

inline EngineOptions options(double timeout = 20) {
  EngineOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int>(timeout * 1000));
  return options;
}

// Runs `body` for every rank; returns the text of each rank's exception, "" without one.
inline std::vector<std::string> run(const std::vector<int>& hosts, const std::function<void(Engine&)>& body,
                                    double timeout = 20, size_t degree = 8, bool flat = false, bool transfers = false) {
  std::vector<Wiring> wirings = wire(hosts, degree, flat, transfers);
  std::vector<std::string> problems(hosts.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Engine engine(std::move(wirings[rank]), options(timeout));
        body(engine);
      } catch (const std::exception& error) {
        problems[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return problems;
}

inline OperationPtr operation(Kind kind, const std::string& name, DType dtype, std::vector<int64_t> shape,
                              const void* in, void* out) {
  auto made = std::make_shared<farandole::Operation>();
  made->request.kind = kind;
  made->request.name = name;
  made->request.dtype = dtype;
  made->request.shape = std::move(shape);
  made->request.cacheable = true;
  made->input = static_cast<const std::byte*>(in);
  made->output = static_cast<std::byte*>(out);
  return made;
}

inline OperationPtr sum(const std::string& name, std::vector<float>& values) {
  return operation(Kind::Allreduce, name, DType::Float32, {static_cast<int64_t>(values.size())}, values.data(),
                   values.data());
}

// Waits with a limit; throws the operation's error.
inline void finish(Engine& engine, const OperationPtr& operation) {
  if (!engine.wait(*operation, std::chrono::seconds(30)))
    throw Error::internal("'" + operation->request.name + "' hangs");
  if (operation->error) throw *operation->error;
}

inline void submit(Engine& engine, const OperationPtr& operation, bool wake = true) {
  engine.submit({&operation, 1}, wake);
}

inline void run_now(Engine& engine, const OperationPtr& operation) {
  farandole::Recurring recurring;
  recurring.operations = {operation};
  recurring.arrange();
  if (!engine.run_in_lane(recurring, [] {})) submit(engine, operation, false);
  finish(engine, operation);
}

}  // namespace ranks
