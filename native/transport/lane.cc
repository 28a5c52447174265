#include "transport/lane.h"

namespace farandole {

LaneRounds::Fields LaneRounds::unpack(uint64_t bits) {
  const auto field = [bits](int shift, int width) {
    return static_cast<uint32_t>(bits >> shift & ((uint64_t{1} << width) - 1));
  };
  return {field(44, 20), field(43, 1), field(23, 20), field(11, 12), field(0, 11)};
}

uint64_t LaneRounds::pack(const Fields& fields) {
  return static_cast<uint64_t>(fields.round) << 44 | static_cast<uint64_t>(fields.spoiled) << 43 |
         static_cast<uint64_t>(fields.number) << 23 | static_cast<uint64_t>(fields.instance) << 11 | fields.arrivals;
}

int LaneRounds::compare(uint32_t word_tag, uint32_t round_tag) {
  if (word_tag == round_tag) return 0;
  // Tags wrap; no rank is ever half their range behind.
  return ((word_tag - round_tag) & 0xfffff) < 0x80000 ? 1 : -1;
}

LaneRounds::Arrival LaneRounds::arrive(uint32_t round, uint32_t number, uint32_t instance) {
  instance &= 0xfff;
  std::atomic<uint64_t>& word = words_[round % kRounds].bits;
  uint64_t seen = word.load(std::memory_order_acquire);
  for (;;) {
    Fields fields = unpack(seen);
    const int order = compare(fields.round, tag(round));
    // A later round uses the word, so this round ended without this rank and was not agreed.
    if (order > 0) return Arrival::Missed;
    if (order == 0 && fields.spoiled != 0) return fields.instance == instance ? Arrival::Refused : Arrival::Missed;
    if (order < 0) fields = {tag(round), 0, number, instance, 0};
    const bool fits = fields.number == number;
    if (fits) ++fields.arrivals;
    else fields.spoiled = 1;
    if (word.compare_exchange_weak(seen, pack(fields), std::memory_order_acq_rel, std::memory_order_acquire))
      return fits ? Arrival::Waiting : Arrival::Refused;
  }
}

LaneRounds::State LaneRounds::state(uint32_t round, uint32_t size) const {
  const Fields fields = unpack(words_[round % kRounds].bits.load(std::memory_order_acquire));
  const int order = compare(fields.round, tag(round));
  if (order < 0) return State::Open;
  if (order > 0 || fields.spoiled != 0) return State::Spoiled;
  return fields.arrivals == size ? State::Agreed : State::Open;
}

LaneRounds::State LaneRounds::spoil(uint32_t round, uint32_t size) {
  std::atomic<uint64_t>& word = words_[round % kRounds].bits;
  uint64_t seen = word.load(std::memory_order_acquire);
  for (;;) {
    Fields fields = unpack(seen);
    const int order = compare(fields.round, tag(round));
    if (order > 0 || (order == 0 && fields.spoiled != 0)) return State::Spoiled;
    if (order == 0 && fields.arrivals == size) return State::Agreed;
    if (order < 0) fields = {tag(round), 0, 0, 0, 0};
    fields.spoiled = 1;
    if (word.compare_exchange_weak(seen, pack(fields), std::memory_order_acq_rel, std::memory_order_acquire))
      return State::Spoiled;
  }
}

std::byte* LaneRounds::beside(uint32_t round, uint32_t rank, uint32_t size, size_t bytes) {
  auto& payload = words_[round % kRounds].payload;
  const size_t stride = (bytes + 7) / 8 * 8;
  return stride * size <= payload.size() ? payload.data() + stride * rank : nullptr;
}

bool LaneRounds::occupied(uint32_t round) const {
  const Fields fields = unpack(words_[round % kRounds].bits.load(std::memory_order_acquire));
  return compare(fields.round, tag(round)) == 0 && fields.spoiled == 0 && fields.arrivals > 0;
}

}  // namespace farandole
