#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "collectives/fabric.h"
#include "engine/device_agreement.h"
#include "transport/guard.h"
#include "transport/segment.h"
#include "transport/tcp.h"

namespace farandole {

/// The connections of a rank to its peers, made before the engine starts.
struct Wiring {
  /// Connected, authenticated sockets to a rank of another host; the engine owns them.
  struct Remote {
    int peer;
    Descriptor control;      // open only if one rank is the other's parent
    Descriptor data;         // open only if the ranks are in each other's data_peers()
    Descriptor transfers{};  // open only if the segment has message rings
  };
  int rank = 0;
  int size = 1;
  std::vector<int> local_ranks{0};  // the ranks of this host, in the order of their areas in the segment
  std::shared_ptr<Segment> segment;
  std::vector<Remote> remotes;       // ranks of other hosts with a connection to this rank
  std::vector<int> parents{-1};      // the tree of control connections; a host's first rank is the parent of its others
  std::vector<int> hosts{0};         // hosts[r] is the number of rank r's host
  std::vector<int> members{};        // of a process set: the job's numbers of its ranks
  std::string process_set{};         // the set's name
  std::shared_ptr<Fabric> fabric{};  // carries the data, if given; there are no data sockets then
  unsigned cores = std::thread::hardware_concurrency();  // that the ranks of this host may keep busy, the same on all

  /// Throw Error (Internal) unless the fields are consistent.
  void validate() const;

  /// Return whether this rank is the coordinator.
  [[nodiscard]] bool is_coordinator() const { return rank == 0; }
  [[nodiscard]] bool is_one_host() const { return local_ranks.size() == hosts.size(); }
  /// Return whether each rank of this host has a core.
  [[nodiscard]] bool has_spare_cores() const { return local_ranks.size() <= cores; }
  /// Return whether an exchange between all ranks moves no more bytes between hosts than any other algorithm: few
  /// ranks, all on one host or each on a host of its own.
  [[nodiscard]] bool exchanges_well() const;
  /// Return whether the coordinator reduces small tensors, see carried.h. Where hosts have several ranks, a reduction
  /// in two levels may have other bits than one of all inputs.
  [[nodiscard]] bool carries_inputs() const { return !fabric && !is_one_host() && exchanges_well(); }
  [[nodiscard]] int local_rank() const;  // this rank's index in `local_ranks`
  [[nodiscard]] RankArea& own_area() const { return segment->area(local_rank()); }
  [[nodiscard]] Life& life(size_t local_rank) const { return segment->area(static_cast<int>(local_rank)).life; }

  /// Restate `error` in the job's rank numbers. Apply it to every error that leaves the engine.
  [[nodiscard]] Error in_job_ranks(const Error& error) const { return error.among(process_set, members); }
};

struct EngineOptions {
  Knobs knobs;  // of rank 0; sent to the other ranks with the first plan
  size_t cache_capacity = 16384;
  std::chrono::nanoseconds spin{100'000};
  std::chrono::nanoseconds timeout{0};                // of one operation; 0 = none
  std::chrono::nanoseconds heartbeat{3'000'000'000};  // longest silence of a live remote peer; 0 = unlimited
  std::chrono::nanoseconds stall{0};                  // age from which stalls() names an operation; 0 = never
  bool look_ahead = true;  // fusion skips operations of another type; off only to measure the difference
  size_t kept_results = size_t{256} << 20;  // bytes of unused results kept for reuse
  GpuOptions gpu{};

  /// Return these options with a short spin if `wiring` has more local ranks than cores: a spinning rank would take the
  /// core of the rank that it waits for.
  [[nodiscard]] EngineOptions fitted_to(const Wiring& wiring) const;
};

/// The world of a wiring, and its links to other hosts.
struct WiredWorld {
  std::unique_ptr<World> world;
  std::vector<const TcpLink*> links;
};

/// Make the world of `wiring`. Takes the data sockets of `wiring.remotes`. Throws Error (Internal) if one is missing.
/// `guard` must outlive the world.
[[nodiscard]] WiredWorld connect_world(Wiring& wiring, Guard& guard, std::chrono::nanoseconds spin);

}  // namespace farandole
