#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/operation.h"
#include "engine/pending.h"
#include "engine/wiring.h"

namespace farandole {

/// The work that a driver performs. Every call holds the driver's lock.
class Work {
 public:
  virtual ~Work() = default;

  virtual bool progress() noexcept = 0;      // exchange messages, run agreed plans; return whether anything moved
  virtual void check_peers() noexcept = 0;   // look for lost ranks; called when nothing moved
  virtual void arm_doorbell() noexcept = 0;  // make data from other hosts ring the doorbell; called before a sleep
};

/// Choice of the thread that makes progress, and the waits of the others.
///
/// A thread that waits for an operation also drives. The driver's own thread drives operations that no thread waits
/// for; otherwise it sleeps on this rank's doorbell in the segment. It holds the rank's life word and calls the
/// operations' listeners.
class Driver {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// With `always_listens` the thread drives even without pending operations, because remote ranks cannot wake it.
  Driver(const Wiring& wiring, std::chrono::nanoseconds spin, bool always_listens, const Pending& pending, Work& work);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  void start();             // start the thread; return when it holds the life word. Throws if that fails
  void stop(Lock driving);  // stop and join the thread, which drives no more once the lock is free
  void abandon();           // in a forked child: drop the thread, which runs in the parent
  void wake(uint64_t now);  // drive operations added at `now` for which no thread is about to wait

  /// Drive until `operation` is done or `limit` has passed; return whether it is done.
  bool wait(Operation& operation, std::chrono::nanoseconds limit);

  [[nodiscard]] Lock try_lock() { return Lock(mu_, std::try_to_lock); }
  void notify_waiters() { turn_.wake_sleepers(); }  // the lock is free, or an operation has completed

  /// Complete `operation`, with `error` restated in the job's ranks. Needs the lock. The driver's thread calls the
  /// listener later, without the lock, so a listener may submit and even wait.
  void complete(const OperationPtr& operation);
  void fail(const OperationPtr& operation, const Error& error);
  void report() noexcept;  // call the listeners of completed operations

  /// Take the lock for good. After `deadline` (now_ns()) the running collective is stopped.
  [[nodiscard]] Lock take_over(uint64_t deadline);
  [[nodiscard]] bool is_stopping() const { return stopping_.load(); }

  [[nodiscard]] bool is_in_background() const { return in_background_; }  // the driver's thread drives; needs the lock
  [[nodiscard]] uint64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

 private:
  void run() noexcept;
  bool drive_in_background();
  void collect_burst();
  [[nodiscard]] bool has_waiter() const;
  [[nodiscard]] bool has_work() const { return !pending_.empty() || always_listens_; }

  const Wiring& wiring_;
  const uint64_t spin_ns_;
  const bool always_listens_;
  const Pending& pending_;
  Work& work_;
  Signal& doorbell_;  // this rank's, in the segment

  std::mutex mu_;               // held by the thread that makes progress
  bool in_background_ = false;  // guarded by mu_
  std::atomic<bool> stopping_{false};
  Signal bell_;  // wakes the driver's thread
  Signal turn_;  // wakes waiters while another thread drives

  std::atomic<int> waiters_{0};
  std::atomic<bool> called_{false};        // bell_ has rung; the thread has not woken yet
  std::atomic<uint64_t> submitted_ns_{0};  // last submission without a waiting thread
  std::atomic<uint64_t> last_wait_ns_{0};  // end of the last wait
  std::atomic<uint64_t> waited_ns_{0};
  bool in_burst_ = false;  // several operations were queued at the last check; used by the thread only

  std::mutex finished_mu_;
  std::vector<OperationPtr> finished_;  // listeners not called yet
  std::atomic<bool> has_finished_{false};

  std::promise<void> started_;
  std::thread thread_;
};

}  // namespace farandole
