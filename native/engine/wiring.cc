#include "engine/wiring.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "transport/shm_link.h"

namespace farandole {
namespace {

constexpr size_t kMostExchanging = 16;  // ranks; each sends to every other one

/// Return whether a rank of a grid is connected to more ranks than its column, so that it can also work in one level.
bool is_flat(const Wiring& wiring, const Grid& grid) {
  return std::ranges::count_if(wiring.remotes, [](const auto& each) { return each.data.is_open(); }) >= grid.hosts;
}

/// The links of one rank's world.
class LinkMaker {
 public:
  explicit LinkMaker(Wiring& wiring) : wiring_(wiring) {}

  /// Return a link over the connection to `peer`, at index `place` of its mesh. Another link may share the connection:
  /// no operation leaves bytes in it.
  std::unique_ptr<Link> link(int peer, int place, bool shared) {
    const auto remote = std::ranges::find(wiring_.remotes, peer, &Wiring::Remote::peer);
    if (remote == wiring_.remotes.end() || !remote->data.is_open())
      throw Error::internal("there is no connection to rank " + std::to_string(peer));
    Descriptor fd = shared ? remote->data.duplicate() : std::move(remote->data);
    auto made = std::make_unique<TcpLink>(place, fd.release(), peer);
    tcp.push_back(made.get());
    return made;
  }

  /// Return links to the ranks with the same place on the other hosts, by host.
  std::vector<std::unique_ptr<Link>> column(const Grid& grid, bool shared) {
    std::vector<std::unique_ptr<Link>> links(static_cast<size_t>(grid.hosts));
    for (const int peer : data_peers(wiring_.rank, wiring_.hosts)) {
      const int host = grid.place_of(peer).first;
      links[static_cast<size_t>(host)] = link(peer, host, shared);
    }
    return links;
  }

  /// Return links to all ranks, by rank; those of this host use the segment.
  std::vector<std::unique_ptr<Link>> all() {
    const auto& local = wiring_.local_ranks;
    const int own = wiring_.local_rank();
    std::vector<std::unique_ptr<Link>> links(static_cast<size_t>(wiring_.size));
    for (const int peer : data_peers(wiring_.rank, wiring_.hosts, true))
      links[static_cast<size_t>(peer)] = link(peer, peer, false);
    for (size_t i = 0; i < local.size(); ++i) {
      const auto peer = static_cast<int>(i);
      if (peer != own)
        links[static_cast<size_t>(local[i])] =
            std::make_unique<ShmLink>(local[i], wiring_.segment->area(peer), wiring_.segment->pair_ring(own, peer),
                                      wiring_.segment->pair_ring(peer, own), false);
    }
    return links;
  }

  std::vector<const TcpLink*> tcp;  // all TCP links made

 private:
  Wiring& wiring_;
};

}  // namespace

void Wiring::validate() const {
  const auto grid = grid_of(rank, hosts);
  const bool pair_rings = !is_one_host() && (!grid || is_flat(*this, *grid));
  if (static_cast<int>(hosts.size()) != size || local_rank() == static_cast<int>(local_ranks.size()) ||
      segment->ranks() != static_cast<int>(local_ranks.size()) || segment->has_pair_rings() != pair_rings)
    throw Error::internal("the segment does not fit the ranks of this host");
  if (fabric && (fabric->rank() != rank || fabric->size() != size))
    throw Error::internal("the fabric does not fit the ranks");
}

int Wiring::local_rank() const {
  return static_cast<int>(std::find(local_ranks.begin(), local_ranks.end(), rank) - local_ranks.begin());
}

EngineOptions EngineOptions::fitted_to(const Wiring& wiring) const {
  EngineOptions fitted = *this;
  if (wiring.has_spare_cores()) return fitted;
  fitted.spin = std::min<std::chrono::nanoseconds>(spin, std::chrono::microseconds(2));
  return fitted;
}

bool Wiring::exchanges_well() const {
  const size_t used = std::set(hosts.begin(), hosts.end()).size();
  return hosts.size() <= kMostExchanging && (used == 1 || used == hosts.size());
}

WiredWorld connect_world(Wiring& wiring, Guard& guard, std::chrono::nanoseconds spin) {
  const WaitPolicy policy{spin};
  const auto shared = [&] {
    return SharedMesh(wiring.segment, wiring.local_rank(), wiring.local_ranks, guard, policy);
  };
  if (wiring.fabric) return {wiring.fabric->make_world(guard, policy, wiring.exchanges_well()), {}};
  // One rank passes nothing on, and the algorithms over links then work where the tensors are, without slots.
  if (wiring.size == 1) return {make_world(Mesh(0, std::vector<std::unique_ptr<Link>>(1), guard, policy)), {}};
  if (wiring.is_one_host()) return {make_world(shared()), {}};
  LinkMaker maker(wiring);
  std::optional<GridMesh> rows;
  if (const auto grid = grid_of(wiring.rank, wiring.hosts)) {
    const bool flat = is_flat(wiring, *grid);
    rows.emplace(*grid, shared(), Mesh(grid->host, maker.column(*grid, flat), guard, policy));
    if (!flat) return {make_world(std::move(*rows)), std::move(maker.tcp)};
  }
  auto links = std::make_unique<Mesh>(wiring.rank, maker.all(), guard, policy);
  return {rows ? make_world(std::move(*rows), std::move(links)) : make_world(std::move(*links)), std::move(maker.tcp)};
}

}  // namespace farandole
