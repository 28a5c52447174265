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

/// The work that a driver drives. Every call is made with the driver's lock held.
class Work {
 public:
  virtual ~Work() = default;

  virtual bool progress() noexcept = 0;      // talk to the other ranks, run agreed plans; return whether anything moved
  virtual void check_peers() noexcept = 0;   // look for lost ranks; called when nothing moves
  virtual void arm_doorbell() noexcept = 0;  // let news from other hosts ring the doorbell; called before a sleep
};

/// Threads that wait for operations, and the one that makes progress.
///
/// A thread that waits also drives. The driver's own thread drives operations that no thread waits for; otherwise it
/// sleeps on this rank's doorbell in the segment. It holds the rank's life word and calls the operations' listeners.
class Driver {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// With `always_listens` the thread drives without pending operations too: remote ranks cannot wake it.
  Driver(const Wiring& wiring, std::chrono::nanoseconds spin, bool always_listens, const Pending& pending, Work& work);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  void start();             // start the thread; return when it holds the life word. Throws what prevents it
  void stop();              // stop and join the thread; the lock must be free
  void abandon();           // in a forked child: drop the thread, which runs in the parent only
  void wake(uint64_t now);  // drive operations that were added at `now` and that no thread is about to wait for

  /// Drive until `operation` is done or `limit` has passed; return whether it is done.
  bool wait(Operation& operation, std::chrono::nanoseconds limit);

  [[nodiscard]] Lock try_lock() { return Lock(mu_, std::try_to_lock); }
  void notify_waiters() { turn_.nudge(); }  // the lock is free, or an operation is done

  /// End `operation`, with `error` restated in the job's ranks. Needs the lock. The driver's thread calls the listener
  /// later, without the lock: a listener may submit, and even wait.
  void complete(const OperationPtr& operation);
  void fail(const OperationPtr& operation, const Error& error);
  void report() noexcept;  // call the listeners of operations that are done

  /// Take the lock for good. After `deadline` (now_ns()) the running collective is told to stop.
  [[nodiscard]] Lock take_over(uint64_t deadline);
  [[nodiscard]] bool is_stopping() const { return stopping_.load(); }

  [[nodiscard]] bool is_in_background() const { return in_background_; }  // the own thread drives; needs the lock
  [[nodiscard]] uint64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

 private:
  void run() noexcept;
  bool drive_in_background();
  void collect_burst();
  [[nodiscard]] bool is_attended() const;
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
  std::atomic<bool> called_{false};        // bell_ has rung, and the thread has not come yet
  std::atomic<uint64_t> submitted_ns_{0};  // last submission without a waiter
  std::atomic<uint64_t> last_wait_ns_{0};  // end of the last wait
  std::atomic<uint64_t> waited_ns_{0};
  bool in_burst_ = false;  // the thread's own: several operations were queued when it last looked

  std::mutex finished_mu_;
  std::vector<OperationPtr> finished_;  // their listeners are to be called
  std::atomic<bool> has_finished_{false};

  std::promise<void> started_;
  std::thread thread_;
};

}  // namespace farandole
