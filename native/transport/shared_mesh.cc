#include "transport/shared_mesh.h"

#include "base/error.h"

namespace farandole {
namespace {

/// Checks the guard and, because the peer is on this host, its life word.
class PeerGuard : public Guard {
 public:
  PeerGuard(Guard& outer, const Life& life, Signal& signal, uint32_t target, int peer)
      : outer_(outer), life_(life), signal_(signal), target_(target), peer_(peer) {}

  void check() override {
    const Life::State state = life_.state();
    if (signal_.reached(target_)) return;  // the peer did its part before it left
    // Check first: a rank that leaves because another is lost reports that other rank before it leaves.
    outer_.check();
    if (state == Life::State::Dead || state == Life::State::Left) throw Error::peer_lost("", peer_, reason_of(state));
  }

  [[nodiscard]] bool spins_briefly() const override { return outer_.spins_briefly(); }

 private:
  Guard& outer_;
  const Life& life_;
  Signal& signal_;
  uint32_t target_;
  int peer_;
};

}  // namespace

uint32_t SharedMesh::begin_stripes(bool pipeline) {
  if (!pipeline || !after_pipeline_) await(&RankArea::finished, operations_);
  after_pipeline_ = pipeline;
  return stripes_;
}

void SharedMesh::end_stripes(uint32_t next_stripe) {
  stripes_ = next_stripe;
  segment_->area(rank_).finished.publish(++operations_);
}

uint32_t SharedMesh::offer(bool mine) {
  ++offered_;
  segment_->area(rank_).offered.publish(2 * offered_ + (mine ? 1 : 0));
  return offered_;
}

bool SharedMesh::all_offer(uint32_t number) {
  await(&RankArea::offered, 2 * number);
  for (int peer = 0; peer < size(); ++peer)
    if (segment_->area(peer).offered.load() != 2 * number + 1) return false;
  return true;
}

void SharedMesh::finish_direct(uint32_t number) {
  segment_->area(rank_).direct_done.publish(number);
  await(&RankArea::direct_done, number);
}

void SharedMesh::await_one(int peer, Signal RankArea::* signal, uint32_t target) {
  RankArea& area = segment_->area(peer);
  if ((area.*signal).reached(target)) [[likely]]
    return;
  PeerGuard guard(guard_, area.life, area.*signal, target, names_[static_cast<size_t>(peer)]);
  Waiter(guard, policy_).until(area.*signal, target);
}

bool SharedMesh::have(Signal RankArea::* signal, uint32_t target) {
  for (int peer = 0; peer < size(); ++peer) {
    RankArea& area = segment_->area(peer);
    if ((area.*signal).reached(target)) continue;
    const Life::State state = area.life.state();
    if (state == Life::State::Dead || state == Life::State::Left)
      PeerGuard(guard_, area.life, area.*signal, target, names_[static_cast<size_t>(peer)]).check();
    if (!(area.*signal).reached(target)) return false;
  }
  return true;
}

}  // namespace farandole
