#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "base/fork.h"
#include "collectives/choose.h"
#include "engine/collector.h"
#include "engine/control.h"
#include "engine/doorman.h"
#include "engine/lane.h"
#include "engine/negotiator.h"
#include "engine/operation.h"
#include "engine/pace.h"
#include "engine/pending.h"
#include "engine/recurring.h"
#include "engine/silence.h"
#include "engine/trace.h"
#include "engine/tree.h"
#include "transport/arena.h"
#include "transport/segment.h"
#include "transport/tcp.h"
#include "transport/waiter.h"

namespace farandole {

/// Where an engine finds its peers.
struct Wiring {
  /// Connected, authenticated sockets to a rank of another host; the engine owns them.
  struct Remote {
    int peer;
    Descriptor control;  // closed unless one of the two is the other's parent
    Descriptor data;     // closed unless the two are in data_peers() of each other
  };
  int rank = 0;
  int size = 1;
  std::vector<int> local_ranks{0};  // the ranks of this host, in the order of their areas in the segment
  std::shared_ptr<Segment> segment;
  std::vector<Remote> remotes;  // ranks that are not local and that this one has a connection to
  // The tree of control connections: who asks whom, -1 for rank 0. Ranks of one host ask the first of them, or are it.
  std::vector<int> parents{-1};
  std::vector<int> hosts{0};   // hosts[r] is the number of the host of rank r
  std::vector<int> members{};  // when these are some of the job's ranks: their numbers in the job
  std::string process_set{};   // what people call them then
};

struct EngineOptions {
  Knobs knobs;  // of rank 0: the others begin with the default ones, and hear of these with the first plan
  size_t cache_capacity = 16384;
  std::chrono::nanoseconds spin{100'000};
  std::chrono::nanoseconds timeout{0};                // of one operation; 0 = never
  std::chrono::nanoseconds heartbeat{3'000'000'000};  // the longest silence of a remote peer that lives; 0 = any
  std::chrono::nanoseconds stall{0};                  // after which stalls() names an operation; 0 = never
  bool look_ahead = true;  // of fusion, past operations of another type; off to measure what it is worth
  size_t kept_results = size_t{256} << 20;  // bytes of results that nobody uses any more, kept for the next ones
};

struct EngineStats {
  uint64_t operations = 0;  // completed
  uint64_t buckets = 0;     // executed
  uint64_t bytes = 0;       // of the inputs
  uint64_t asked_by_number = 0;
  uint64_t asked_in_full = 0;
  uint64_t in_lane = 0;    // operations that were agreed without the coordinator
  uint64_t waited_ns = 0;  // by threads that waited for operations, moments not counted
};

/// One rank's share in the collectives: takes operations, agrees with the others on an order, runs them.
///
/// Progress is made by whoever waits (wait(), run()); only operations that nobody waits for are driven by the engine's
/// own thread, which sleeps on this rank's doorbell in the segment. Whoever drives holds `driver_`. Once a rank is
/// lost, every waiter, present and future, gets the same error.
class Engine : private Guard {
 public:
  Engine(Wiring wiring, EngineOptions options);  // starts the thread
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Takes operations, all or none; never blocks. With `wake` the engine's thread is told, else the caller is about to
  /// wait. Throws Error: Invalid (a name that is in flight), Closed, or the failure that ended the job.
  void submit(std::span<const OperationPtr> operations, bool wake);
  void submit(const OperationPtr& operation, bool wake) { submit({&operation, 1}, wake); }

  /// Runs operations to their end if all ranks are about to run just these now; returns whether they are done. Else
  /// nothing has happened, and they are to be submitted. `settle` is called at most once, before anything that takes
  /// longer than a moment; this returns within milliseconds when the other ranks do not come.
  bool run_in_lane(Recurring& recurring, const std::function<void()>& settle);

  /// Drives until `operation` is done or `limit` has passed; returns whether it is done. Look at `operation->error`
  /// then.
  bool wait(Operation& operation, std::chrono::nanoseconds limit);

  /// A buffer that the other ranks of the host see too, so that allreduces in place need not copy it: Arena::take. In a
  /// world of several hosts, ordinary memory. Lives as long as somebody holds it, also when the engine is gone.
  [[nodiscard]] std::shared_ptr<std::byte> shared_buffer(size_t bytes);

  /// Says goodbye to the others, fails what is pending, and stops. Idempotent. Does nothing in a forked child.
  void shutdown();

  /// Throws the failure that has ended the job, if one has: for who does not wait for an operation, but for the ranks.
  void require_alive();

  /// Counts the threads that are inside a call and will come back to the binding that they came from.
  void visit(int change) { visitors_.fetch_add(change); }

  /// Waits after shutdown() until they have come back, a second at most.
  void see_off() const;

  /// Is this a child of the process that the engine lives in? Its threads and its word to the peers are the parent's,
  /// and no lock may be taken: a thread that does not exist here may hold it.
  [[nodiscard]] bool is_forked() const { return fork_number() != fork_number_; }

  [[nodiscard]] EngineStats stats();

  /// What some ranks have asked for at least so long ago, and others not; known to rank 0 only, half a second late.
  [[nodiscard]] std::vector<Negotiator::Stall> stalls();

  /// From a coming plan on, all ranks work with `knobs`; with `paced` the steps from there on are marked. To be called
  /// on rank 0. Takes effect with the next operation: where nothing runs, nothing changes. Throws Error (Invalid) for
  /// knobs that cannot be right, and on other ranks.
  void turn(const Knobs& knobs, bool paced);

  /// What this rank works with, after so many turns; and the steps since the last one, if they are marked.
  struct Tuned {
    Knobs knobs;
    uint64_t turns = 0;
    std::vector<Pace::Mark> marks;
  };
  [[nodiscard]] Tuned tuned();

  [[nodiscard]] Trace& trace() { return trace_; }
  [[nodiscard]] int rank() const { return wiring_.rank; }
  [[nodiscard]] int size() const { return wiring_.size; }

 private:
  void require_own_process(const std::string& name) const;
  [[nodiscard]] bool is_in_the_way() const override { return in_the_way_; }
  void check() override;  // the guard of all waits inside collectives

  [[nodiscard]] World make_world();
  [[nodiscard]] std::unique_ptr<Link> data_link(int peer, int place, bool shared);
  [[nodiscard]] std::vector<std::unique_ptr<Link>> links_to_all();
  void connect_control();
  void background() noexcept;
  [[nodiscard]] bool leads() const { return wiring_.rank == 0; }
  [[nodiscard]] bool is_parent(const ControlStream& control) const {
    return !leads() && control.peer() == tree_.parent(wiring_.rank);
  }
  void gather();
  void tell_waiters();
  [[nodiscard]] bool has_work() const { return !pending_.empty() || listens_always_; }
  [[nodiscard]] bool is_attended() const;

  // Only with `driver_` held; each returns whether anything moved.
  bool progress() noexcept;
  void listen() noexcept;
  bool drive_once();
  bool ask();
  bool hear();
  void forward();
  void heed(const ControlStream& from, Message message);
  void heed(Plan plan);
  bool decide();
  void add_turn(Plan& plan);
  void turn_to(const Knobs& knobs);
  template <class Payload>
  void tell_children(const Payload& payload);
  void run_plan(const Plan& plan, uint64_t agreed);
  void run_bucket(const Bucket& bucket, uint64_t agreed);
  [[nodiscard]] OperationPtr take(const Entry& entry);
  void run_operations(const Bucket& bucket, std::span<const OperationPtr> operations, uint64_t agreed);
  void finish_in_lane(const Recurring& recurring, size_t payload);
  void run_recurring(const Recurring& recurring);
  void count(std::span<const OperationPtr> operations, uint64_t bytes);
  void refuse(const Refusal& refusal);
  [[nodiscard]] Error root_cause(const Error& error);
  void look_for_lost();
  void look_for_left();
  void part_with(int rank, int first);
  [[nodiscard]] std::optional<Error> lost_remote() const;
  void look_for_overdue();
  void look_for_stopped(uint64_t now);
  void look_for_cut(uint64_t now);
  void look_for_stalls(double now);
  void poison(Error error) noexcept;
  [[nodiscard]] std::string reason_of(Abort::Reason reason) const;
  [[nodiscard]] Abort abort_of(const Error& error) const;

  /// Whatever leaves the engine speaks of ranks by their numbers in the job.
  [[nodiscard]] Error told(const Error& error) const { return error.among(wiring_.process_set, wiring_.members); }
  void fail(const OperationPtr& operation, const Error& error);
  void conclude(const OperationPtr& operation);
  void report() noexcept;
  void fail_pending(const Error& error);
  [[nodiscard]] Signal& doorbell() { return wiring_.segment->area(local_rank_).doorbell; }

  const uint32_t fork_number_ = fork_number();
  Wiring wiring_;
  EngineOptions options_;
  int local_rank_ = 0;
  Trace trace_;
  Tree tree_;
  Negotiator negotiator_;     // used by rank 0 only
  Collector collector_;       // used by all others
  std::optional<Lane> lane_;  // in a world of one host with a core for every rank
  std::shared_ptr<ResultPool> results_ = ResultPool::make(options_.kept_results);
  std::shared_ptr<Arena> arena_;  // in a world of one host
  struct DataLink {
    const TcpLink* link;  // of world_
    Silence silence;      // since when what we send there is not answered
  };
  std::vector<DataLink> data_links_;
  World world_;                         // after what make_world() fills in
  std::deque<ControlStream> controls_;  // to the parent (first, but rank 0 has none), and to the children
  bool listens_always_ = false;         // remote ranks cannot wake the thread unless it listens
  struct Agreed {
    Plan plan;
    uint64_t at;  // for the trace
  };
  std::deque<Agreed> plans_;
  std::vector<bool> left_;              // by rank: it has shut down, having done all its part
  std::vector<bool> told_;              // by rank: who has to hear of it has been told
  std::optional<int> first_left_;       // who shut down before all others, as far as is known here
  std::optional<Error> verdict_;        // what a peer said has ended the job
  uint64_t looked_ns_ = 0;              // when overdue operations were last looked for
  uint32_t executed_ = 0;               // operations so far: the same on every rank between two of them
  uint64_t operation_deadline_ns_ = 0;  // of what is being executed
  uint64_t links_looked_ns_ = 0;        // when the data links were last looked at

  std::mutex driver_;        // held by whoever makes progress
  bool in_the_way_ = false;  // with `driver_`: the engine's thread drives, nobody waits
  std::atomic<int> visitors_{0};
  std::atomic<int> waiters_{0};            // threads in wait(): they drive, not the background thread
  std::atomic<bool> called_{false};        // the background thread has been told, and has not come yet
  std::atomic<uint64_t> submitted_ns_{0};  // when the last operation came that it is to drive
  bool came_many_ = false;                 // when it looked last, there were several; of its own
  std::atomic<uint64_t> left_off_ns_{0};   // when somebody last stopped waiting
  Signal work_;                            // the background thread's own bell, for this process only
  Signal turn_;  // for waiters while another thread drives: it has done something, or has stopped
  Pending pending_;
  std::mutex closing_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> failed_{false};

  std::mutex finished_mu_;
  std::vector<OperationPtr> finished_;     // somebody is to be told of them
  std::atomic<bool> has_finished_{false};  // they are not empty

  std::mutex stats_mu_;  // guards what follows, up to stalls_
  EngineStats stats_;
  Tuned tuned_;  // but the marks
  Pace pace_;
  bool paces_ = false;
  std::optional<Knobs> wanted_;       // from the next turn on
  bool pace_wanted_ = false;          // from then on
  std::atomic<bool> turning_{false};  // there is one wanted
  std::atomic<uint64_t> waited_ns_{0};
  std::atomic<uint64_t> agreed_in_lane_{0};
  std::vector<Negotiator::Stall> stalls_;
  double stalls_looked_ = 0;  // for who drives

  std::atomic<bool> stop_{false};
  std::promise<void> born_;
  std::unique_ptr<Doorman> doorman_;
  std::thread thread_;  // last: joined before the members above die
};

}  // namespace farandole
