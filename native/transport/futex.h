#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace farandole {

/// Sleeps while `word` equals `expected`, at most `timeout`. May wake early. Works across processes that share the
/// page.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout);

/// Wakes every sleeper on `word`.
void futex_wake_all(const std::atomic<uint32_t>& word);

/// A word that one side changes and others wait for. The writer makes a system call only when a rank sleeps.
struct alignas(128) Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  /// Publishes `next`, with release semantics for earlier writes.
  void publish(uint32_t next) {
    // The exchange is a full barrier: either the writer sees the sleeper's count, or the sleeper sees the new value.
    value.exchange(next, std::memory_order_seq_cst);
    wake();
  }
  void bump() {
    value.fetch_add(1, std::memory_order_seq_cst);
    wake();
  }
  [[nodiscard]] uint32_t load() const { return value.load(std::memory_order_acquire); }

  /// Returns whether `value` has reached `target`. Counters wrap, hence the signed difference.
  [[nodiscard]] bool reached(uint32_t target) const { return static_cast<int32_t>(load() - target) >= 0; }

  /// Like bump(), but free when there is no sleeper. For data beside the signal that sleepers check.
  void wake_sleepers() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) bump();
  }

  /// Sleeps until the value differs from `seen`, or `timeout`.
  void sleep(uint32_t seen, std::chrono::nanoseconds timeout) {
    sleep_unless(seen, timeout, [] { return false; });
  }

  /// Like sleep(), but returns at once if `held()` is true. It is called after the sleeper has been counted, so the
  /// writer either sees the sleeper or wrote before the call.
  template <class Held>
  void sleep_unless(uint32_t seen, std::chrono::nanoseconds timeout, Held held) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!held()) futex_wait(value, seen, timeout);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  void wake() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(value);
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Signal) == 128);

}  // namespace farandole
