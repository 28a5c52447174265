#include "plugins/mpi/job.h"

#include <dlfcn.h>

#include <numeric>
#include <utility>

namespace farandole::mpi {
namespace {

constexpr const char* kStart = "__import__('farandole.jax.collectives', fromlist=['start']).start()";

/// Returns whether Python has run `code`; it prints the traceback of an error.
bool run_in_python(const char* code) {
  // The library is loaded before anything of farandole is imported, and without a dependency on Python.
  const auto ensure = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  const auto release = reinterpret_cast<void (*)(int)>(::dlsym(RTLD_DEFAULT, "PyGILState_Release"));
  const auto run = reinterpret_cast<int (*)(const char*)>(::dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
  if (ensure == nullptr || release == nullptr || run == nullptr) return false;
  const int state = ensure();
  const bool done = run(code) == 0;
  release(state);
  return done;
}

}  // namespace

thread_local std::string Job::failure_;

Job& Job::of_process() {
  // Never destroyed: XLA ends MPI while the process exits, after static objects are gone.
  static auto* job = new Job;
  return *job;
}

void Job::start() {
  if (std::exchange(started_, true)) return;
  failure_.clear();
  if (run_in_python(kStart) && table_ != nullptr) return;
  if (failure_.empty()) failure_ = "farandole could not start in this process; see the message above";
  world_ = std::make_unique<Communicator>(failure_);
}

void Job::serve(const plugins::CoreTable& table, int32_t rank_id, int32_t size, const Hooks& hooks) {
  table_ = &table;
  rank_id_ = rank_id;
  hooks_ = hooks;
  std::vector<int32_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  world_ = std::make_unique<Communicator>(table, rank_id, 0, 0, std::move(ranks));
}

std::unique_ptr<Communicator> Job::split(int color, int key) {
  if (table_ == nullptr) return std::make_unique<Communicator>(*world_);
  std::vector<int32_t> ranks(static_cast<size_t>(world_->size()));
  int32_t count = 0;
  failure_.clear();
  const int32_t process_set = hooks_.split(color, key, ranks.data(), &count);
  if (process_set < 0) return std::make_unique<Communicator>(failure_);
  ranks.resize(static_cast<size_t>(count));
  return std::make_unique<Communicator>(*table_, rank_id_, process_set, ++splits_, std::move(ranks));
}

void Job::end() {
  if (!started_ || std::exchange(ended_, true) || table_ == nullptr) return;
  hooks_.end();
}

}  // namespace farandole::mpi
