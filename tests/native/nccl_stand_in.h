// The stand-in for NCCL: its own functions, and ranks as threads that work by it.
#pragma once

#include <dlfcn.h>

#include <string>

#include "check.h"
#include "device_ranks.h"

namespace nccl {

/// Loading the stand-in by its path makes it the library "libnccl.so.2" of this process.
template <class F>
F function(const char* name) {
  static void* loaded = ::dlopen(STAND_IN_NCCL, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<F>(::dlsym(loaded, name));
}

inline void set(const char* name, int value) { function<void (*)(int)>(name)(value); }
inline int count(const char* name) { return function<int (*)()>(name)(); }

/// Runs the ranks, and requires that they worked by NCCL without host memory, or not at all by it.
inline void must_run(int size, const ranks::DeviceBody& body, bool by_nccl = true,
                     const farandole::GpuOptions& gpu = {}) {
  const size_t pinned = check::cuda().pinned();
  const int run = count("stand_in_nccl_run");
  for (const std::string& problem : ranks::run_on_devices(size, body, gpu)) check::equal(problem, std::string());
  CHECK_EQ(count("stand_in_nccl_run") > run, by_nccl);
  if (by_nccl) CHECK_EQ(check::cuda().pinned(), pinned);
  CHECK_EQ(count("stand_in_nccl_mismatches"), 0);
  CHECK_EQ(count("stand_in_nccl_strays"), 0);
  CHECK_EQ(check::cuda().error(), 0);
}

}  // namespace nccl
