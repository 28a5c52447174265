// What the stand-in for the CUDA driver is made of: devices whose memory is memory of this machine, and streams.
//
// Streams are threads that run their work later, after a random delay, and in no order with each other: a missing wait
// gives a wrong result. Addresses of device memory may not be touched: the addresses that it hands out are mapped
// without access, and streams use a second mapping. New memory and freed memory hold garbage. Work that touches freed
// memory, or host memory that is not pinned, breaks the device, as in CUDA. Nothing works in a forked child. While a
// stream is captured, work for it spoils the graph, and so do looks at events and allocations by any thread that has
// not said that they are no part of it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace stand_in {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidDevice = 101, kInvalidContext = 201,
              kInvalidHandle = 400, kNotReady = 600, kIllegalAddress = 700, kCaptureUnsupported = 900,
              kCaptureInvalidated = 901;
constexpr int kRelaxed = 2;                  // a mode of capture
constexpr size_t kMemory = size_t{1} << 30;  // unused pages cost nothing
constexpr size_t kSmallest = 256;
constexpr int kMemoryPools = 115;  // an attribute of devices

/// The moment that a record of an event stands for.
struct Moment {
  bool passed = false;
};

struct Stream {
  int device = 0;
  std::deque<std::function<void()>> work;
  bool begun = false;     // has a thread
  bool captured = false;  // its work goes to a graph
  bool ended = false;     // it was destroyed
  int priority = 0;
  std::condition_variable arrived;  // there is work; one each, as many streams sleep
};

struct Context {
  int device = 0;
  Stream legacy;
};

struct Event {
  int device = 0;
  std::shared_ptr<Moment> recorded;
};

/// Memory in the order of streams. What is freed stays with the pool up to the threshold.
struct Pool {
  int device = 0;
  uint64_t threshold = 0;                   // bytes
  uint64_t unused = 0;                      // bytes that it has kept
  bool shared = false;                      // the other devices reach it
  bool waits = true;                        // to reuse memory, a stream waits for the one that has freed it
  std::shared_ptr<Moment> freed = nullptr;  // the last time
};

/// All state. Never destroyed, because the threads of streams live until the process ends.
struct Driver {
  std::mutex mu;                    // guards all members, and orders the work of streams with other threads
  std::condition_variable changed;  // work is done
  int version = 12040;
  int devices = 1;
  std::atomic<int> slowest_us{200};
  int broken = 0;                                       // an error that stays
  std::atomic<bool> one_gpu{false};                     // all devices are the same GPU
  std::atomic<bool> pools{true};                        // devices have memory pools
  pid_t initialized = 0;                                // by this process
  int captures = 0;                                     // streams that are captured
  bool spoiled = false;                                 // a capture
  std::map<std::string, std::pair<int, int>> failures;  // by function: code, calls before it
  std::map<std::string, int> calls;
  std::string held;  // calls of this function wait
  std::map<int, std::unique_ptr<Context>> contexts;
  std::vector<std::unique_ptr<Stream>> streams;  // all that were made: their threads stay
  std::vector<void*> abandoned;                  // work of a device that broke
  std::byte* shown = nullptr;                    // without access
  std::byte* real = nullptr;
  size_t used = 0;
  std::map<uint64_t, size_t> live;                      // device memory: address, bytes
  std::map<size_t, std::vector<uint64_t>> free_blocks;  // by size
  std::map<uint64_t, size_t> pinned;
  std::map<uint64_t, Pool*> pooled;  // memory of a pool
  std::set<Pool*> memory_pools;      // that were made; they stay
  int grown = 0;                     // pools have taken memory of a device, which takes long
};

inline Driver& driver() {
  static auto* made = new Driver;
  return *made;
}

inline thread_local std::vector<Context*> current;
inline thread_local int capture_mode = 0;

/// Returns the error that a call of `function` has to return, 0 for none. Needs the lock.
inline int refusal(const char* function) {
  Driver& d = driver();
  const int made = d.calls[function]++;
  if (d.held == function) {
    std::unique_lock held(d.mu, std::adopt_lock);
    d.changed.wait(held, [&] { return d.held != function; });
    held.release();
  }
  if (const auto found = d.failures.find(function); found != d.failures.end() && made >= found->second.second)
    return found->second.first;
  if (d.initialized != getpid()) return kNotInitialized;
  return d.broken;
}

/// The same for a call that may not be made while a stream is captured.
inline int refusal_of_unsafe(const char* function) {
  Driver& d = driver();
  if (d.captures > 0 && capture_mode != kRelaxed) {
    d.spoiled = true;
    return kCaptureUnsupported;
  }
  return refusal(function);
}

inline bool holds(const std::map<uint64_t, size_t>& ranges, uint64_t address, size_t bytes) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  const auto& [begin, size] = *--after;
  return address - begin + bytes <= size;
}

inline std::byte* real(uint64_t address) {
  return driver().real + (address - reinterpret_cast<uint64_t>(driver().shown));
}

/// Returns device memory; 0 when there is none left. Needs the lock.
inline uint64_t take_memory(size_t bytes) {
  Driver& d = driver();
  size_t size = kSmallest;
  while (size < bytes) size *= 2;
  std::vector<uint64_t>& blocks = d.free_blocks[size];
  uint64_t address = 0;
  if (!blocks.empty()) {
    address = blocks.back();
    blocks.pop_back();
  } else {
    if (d.used + size > kMemory) return 0;
    address = reinterpret_cast<uint64_t>(d.shown) + d.used;
    d.used += size;
  }
  d.live[address] = size;
  return address;
}

inline void map_memory() {
  Driver& d = driver();
  const int file = memfd_create("stand-in device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kMemory) != 0) std::abort();
  const auto map = [file](int access) {
    void* at = mmap(nullptr, kMemory, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) std::abort();
    return static_cast<std::byte*>(at);
  };
  d.shown = map(PROT_NONE);
  d.real = map(PROT_READ | PROT_WRITE);
  close(file);
}

inline void run(Stream* stream) {
  Driver& d = driver();
  std::mt19937 random(static_cast<unsigned>(reinterpret_cast<uintptr_t>(stream) >> 4));
  std::unique_lock lock(d.mu);
  while (true) {
    stream->arrived.wait(lock, [&] { return !stream->work.empty(); });
    const int slowest = d.slowest_us;
    lock.unlock();
    if (slowest > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(slowest)));
    lock.lock();
    // Waits of streams release the lock, so the work stays in the queue until it is done.
    const std::function<void()> next = stream->work.front();
    next();
    stream->work.pop_front();
    d.changed.notify_all();
  }
}

/// Needs the lock. The work runs with the lock, too.
inline void add(Stream& stream, std::function<void()> work) {
  stream.work.push_back(std::move(work));
  if (!stream.begun) {
    stream.begun = true;
    std::thread(run, &stream).detach();
  }
  stream.arrived.notify_all();
}

/// Makes the later work in `stream` wait. Needs the lock.
inline void add_wait(Stream& stream, std::shared_ptr<Moment> moment) {
  add(stream, [moment = std::move(moment)] {
    Driver& d = driver();
    std::unique_lock held(d.mu, std::adopt_lock);
    d.changed.wait(held, [&] { return moment->passed; });
    held.release();
  });
}

/// Frees memory after the work that is in `stream` now, which holds garbage then. Needs the lock.
inline void return_memory(uint64_t address, Stream& stream) {
  add(stream, [address] {
    Driver& d = driver();
    const auto found = d.live.find(address);
    std::memset(real(address), 0xef, found->second);
    d.free_blocks[found->second].push_back(address);
    d.live.erase(found);
  });
}

/// Returns null without a current context, and for a stream that was destroyed. Needs the lock.
inline Stream* stream_of(Stream* given) {
  if (given != nullptr) return given->ended ? nullptr : given;
  return current.empty() ? nullptr : &current.back()->legacy;
}

/// Returns the error of work for a stream that is captured, 0 if it is not. Needs the lock.
inline int refusal_of_capture(const Stream& stream) {
  if (!stream.captured) return 0;
  driver().spoiled = true;
  return kCaptureInvalidated;
}

}  // namespace stand_in
