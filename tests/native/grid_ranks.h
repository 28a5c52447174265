// Ranks as threads on several hosts: a segment per host, and sockets along the columns only.
#pragma once

#include <map>

#include "collectives/grid.h"
#include "link_ranks.h"

namespace check {

class GridRanks {
 public:
  using Body = std::function<void(farandole::GridMesh&, int rank)>;

  /// hosts[r] is the host of rank r.
  explicit GridRanks(const std::vector<int>& hosts, size_t slot_bytes = 16 << 10,
                     std::chrono::milliseconds limit = std::chrono::seconds(60))
      : meshes_(hosts.size()) {
    std::map<int, std::vector<int>> members;
    for (size_t rank = 0; rank < hosts.size(); ++rank) members[hosts[rank]].push_back(static_cast<int>(rank));
    for (const auto& [host, local] : members)
      segments_[host] = farandole::Segment::create(static_cast<int>(local.size()), slot_bytes, false);
    const farandole::WaitPolicy policy{std::chrono::microseconds(5)};
    std::map<std::pair<int, int>, int> ends;
    for (size_t each = 0; each < hosts.size(); ++each) {
      const auto rank = static_cast<int>(each);
      const auto grid = farandole::grid_of(rank, hosts).value();
      guards_.push_back(std::make_unique<Deadline>(limit));
      std::vector<std::unique_ptr<farandole::Link>> links(static_cast<size_t>(grid.hosts));
      for (const int peer : farandole::data_peers(rank, hosts)) {
        if (peer > rank) {
          const auto pair = unix_pair();
          ends[{rank, peer}] = pair[0];
          ends[{peer, rank}] = pair[1];
        }
        const int place = grid.place_of(peer).first;
        links[static_cast<size_t>(place)] = std::make_unique<farandole::TcpLink>(place, ends.at({rank, peer}), peer);
      }
      meshes_[each] = std::make_unique<farandole::GridMesh>(
          grid,
          farandole::SharedMesh(segments_[hosts[each]], grid.local, members[hosts[each]], *guards_.back(), policy),
          farandole::Mesh(grid.host, std::move(links), *guards_.back(), policy));
    }
  }

  [[nodiscard]] size_t size() const { return meshes_.size(); }

  /// Closes all links of `rank`, like its death.
  void drop(int rank) { meshes_[static_cast<size_t>(rank)].reset(); }

  /// Runs `body` on every rank; returns each rank's exception. The deadline is that of one run.
  std::vector<std::optional<farandole::Error>> run(const Body& body) {
    for (const auto& guard : guards_) guard->renew();
    std::vector<std::optional<farandole::Error>> errors(meshes_.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < meshes_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(*meshes_[rank], static_cast<int>(rank));
        } catch (const farandole::Error& error) {
          errors[rank] = error;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  /// The same, for bodies that must not fail.
  void must_run(const Body& body, const std::string& context) {
    const auto errors = run(body);
    for (size_t rank = 0; rank < errors.size(); ++rank)
      that(!errors[rank].has_value(), "no error",
           context + " rank " + std::to_string(rank) + (errors[rank] ? std::string(": ") + errors[rank]->what() : ""));
  }

 private:
  std::map<int, std::shared_ptr<farandole::Segment>> segments_;
  std::vector<std::unique_ptr<Deadline>> guards_;
  std::vector<std::unique_ptr<farandole::GridMesh>> meshes_;
};

}  // namespace check
