#include "plugins/rank_engines.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "plugins/blocking.h"
#include "plugins/submission.h"

namespace farandole::plugins {

struct Member {
  std::shared_ptr<Engine> engine;  // null: this rank is not a member
  std::shared_ptr<SharedStaging> staging;
  std::shared_ptr<KeptRequests> kept = std::make_shared<KeptRequests>();
  std::map<std::string, uint64_t> asked{};  // requests so far under each name that gets a number
};

struct Rank {
  int32_t local_rank, local_size;
  std::map<int32_t, Member> sets;  // by address
};

/// The ranks of one process that have been started.
struct Ranks {
  const uint32_t fork = fork_number();
  std::mutex mu;
  std::map<int32_t, Rank> by_id;
  std::vector<std::vector<int32_t>> known_sets{{}};  // the ranks of each process set, by address; never shrinks
};

namespace {

/// The ranks of this process. A forked child starts with none, and takes no lock that a thread of its parent may hold.
Ranks& ranks() {
  // Never destroyed: a framework's threads may still submit while the process exits.
  static std::atomic<Ranks*> current{new Ranks};
  Ranks* found = current.load();
  while (found->fork != fork_number()) {
    auto fresh = std::make_unique<Ranks>();
    if (current.compare_exchange_strong(found, fresh.get())) return *fresh.release();
  }
  return *found;
}

int32_t find(int32_t rank_id, int32_t process_set, Place* place) noexcept {
  Ranks& all = ranks();
  const std::lock_guard lock(all.mu);
  const auto rank = all.by_id.find(rank_id);
  if (rank == all.by_id.end()) return kNotInitialized;
  const auto set = rank->second.sets.find(process_set);
  if (set == rank->second.sets.end()) return kNotInitialized;
  const Engine* engine = set->second.engine.get();
  *place = {engine == nullptr ? -1 : engine->rank(), engine == nullptr ? 0 : engine->size(), rank->second.local_rank,
            rank->second.local_size};
  return 0;
}

/// The receiver of a request.
struct Addressed {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<SharedStaging> staging;
  std::shared_ptr<KeptRequests> kept;
  std::string name;  // in full
};

/// Throws NotStarted. Needs the lock of `all`.
Rank& rank_of(Ranks& all, int32_t rank_id) {
  const auto rank = all.by_id.find(rank_id);
  if (rank == all.by_id.end()) throw NotStarted("farandole is not initialized in this process; call init() first");
  return rank->second;
}

std::string spelled(const std::vector<int32_t>& set_ranks) {
  std::string text;
  for (const int32_t rank : set_ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

/// Throws Error and NotStarted.
Addressed addressed(const Request& request) {
  Ranks& all = ranks();
  const std::lock_guard lock(all.mu);
  Rank& rank = rank_of(all, request.rank_id);
  const auto set = rank.sets.find(request.process_set);
  if (set == rank.sets.end())
    throw NotStarted("the process set of ranks " +
                     spelled(all.known_sets.at(static_cast<size_t>(request.process_set))) +
                     " is not there (any more); every rank has to call add_process_set first");
  if (set->second.engine == nullptr)
    throw Error::invalid(request.name, "this rank is not a member of the provided process set of ranks " +
                                           spelled(all.known_sets.at(static_cast<size_t>(request.process_set))));
  std::string name = request.name;
  if (name.ends_with('.')) name += std::to_string(set->second.asked[name]++);
  return {set->second.engine, set->second.staging, set->second.kept, name};
}

/// Calls `perform`; reports an exception to the listener. `name` is that of the request.
template <class Perform>
void reporting(const char* name, const Listener* listener, Perform perform) noexcept {
  try {
    perform();
  } catch (const NotStarted& error) {
    report(*listener, kNotInitialized, "'" + std::string(name) + "': " + error.what());
  } catch (const Error& error) {
    report(*listener, static_cast<int32_t>(error.kind), error.what());
  } catch (const std::exception& error) {
    report(*listener, static_cast<int32_t>(ErrorKind::Internal), error.what());
  }
}

void submit(const Request* request, const Listener* listener) noexcept {
  reporting(request->name, listener, [&] {
    const Addressed to = addressed(*request);
    start(*request, to.name, *listener, *to.engine);
  });
}

void run_on_device(const Request* request, void* stream, const Listener* listener) noexcept {
  reporting(request->name, listener, [&] {
    const Addressed to = addressed(*request);
    plugins::run_on_device(*request, to.name, static_cast<CudaDevice::Stream>(stream), *listener, *to.staging->get());
  });
}

void run(const Request* request, const Listener* listener) noexcept {
  reporting(request->name, listener, [&] {
    const Addressed to = addressed(*request);
    run_blocking(*request, to.name, *listener, *to.engine, *to.kept);
  });
}

void* post(const Message* message, const Listener* listener) noexcept {
  PostedMessage* posted = nullptr;
  reporting(message->name, listener, [&] {
    Ranks& all = ranks();
    std::shared_ptr<Engine> engine;
    {
      const std::lock_guard lock(all.mu);
      engine = rank_of(all, message->rank_id).sets.at(0).engine;
    }
    posted = post_message(*message, std::move(engine)).release();
  });
  return posted;
}

void finish(void* posted, const Listener* listener) noexcept {
  const std::unique_ptr<PostedMessage> message(static_cast<PostedMessage*>(posted));
  reporting(message->name(), listener, [&] { message->finish(*listener); });
}

}  // namespace

RankEngines::RankEngines(int32_t local_rank, int32_t local_size) : ranks_(ranks()) {
  const std::lock_guard lock(ranks_.mu);
  while (ranks_.by_id.contains(number_)) ++number_;
  ranks_.by_id.emplace(number_, Rank{local_rank, local_size, {}});
}

int32_t RankEngines::add(const std::vector<int32_t>& set_ranks, std::shared_ptr<Engine> engine,
                         std::shared_ptr<SharedStaging> staging) {
  const std::lock_guard lock(ranks_.mu);
  auto& known = ranks_.known_sets;
  const auto found = std::find(known.begin(), known.end(), set_ranks);
  const auto address = static_cast<int32_t>(found - known.begin());
  if (found == known.end()) known.push_back(set_ranks);
  if (open_) ranks_.by_id.at(number_).sets[address] = {std::move(engine), std::move(staging)};
  return address;
}

void RankEngines::remove(int32_t address) {
  Member gone;  // perhaps the last reference: an engine must not end under the lock
  const std::lock_guard lock(ranks_.mu);
  if (!open_) return;
  auto& sets = ranks_.by_id.at(number_).sets;
  if (const auto found = sets.find(address); found != sets.end()) {
    gone = std::move(found->second);
    sets.erase(found);
  }
}

void RankEngines::close() {
  if (ranks_.fork != fork_number()) return;  // the entry belongs to the parent process
  Rank gone{};
  const std::lock_guard lock(ranks_.mu);
  if (!std::exchange(open_, false)) return;
  const auto found = ranks_.by_id.find(number_);
  gone = std::move(found->second);
  ranks_.by_id.erase(found);
}

const CoreTable& core_table() {
  static constexpr CoreTable table{kTableVersion, &submit, &run, &post, &finish, &run_on_device, &find};
  return table;
}

}  // namespace farandole::plugins
