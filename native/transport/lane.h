#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace farandole {

/// What the ranks of one host agree in without the coordinator: that all of them, with nothing else under way, are
/// about to run the same operation. One word in shared memory per round, so that agreeing and giving up exclude each
/// other.
///
/// A round ends when all ranks have arrived with the same number (agreed), or when one of them arrives with another,
/// gives up, or asks the coordinator for anything (spoiled); then all of them ask the coordinator. A rank that was
/// elsewhere in a spoiled round finds it spoiled when it comes, and moves on.
class LaneRounds {
 public:
  static constexpr uint32_t kRounds = 8;  // words in use; a round's word serves again that many rounds later
  static constexpr uint32_t kMostNumbers = 1u << 20;
  static constexpr uint32_t kMostRanks = (1u << 11) - 1;

  enum class Arrival {
    Waiting,  // this rank was added
    Missed,   // the round was spoiled in an earlier operation: try the next
    Refused,  // the round is spoiled for this very operation: the others ask the coordinator for it
  };
  /// Adds this rank to `round` for operation `number`. `instance` counts the operations that all ranks have run before
  /// it: a name comes again and again, and a round that was given up then says nothing of now.
  Arrival arrive(uint32_t round, uint32_t number, uint32_t instance);

  enum class State { Open, Agreed, Spoiled };
  [[nodiscard]] State state(uint32_t round, uint32_t size) const;

  /// Spoils `round` unless it is agreed; returns what it is now.
  State spoil(uint32_t round, uint32_t size);

  /// Nobody is to wait in any round until resume() was called as often: a rank that has joined never comes.
  void suspend() { suspended_.fetch_add(1, std::memory_order_relaxed); }
  void resume() { suspended_.fetch_sub(1, std::memory_order_relaxed); }
  [[nodiscard]] bool suspended() const { return suspended_.load(std::memory_order_relaxed) != 0; }

  /// True when a rank waits in `round`.
  [[nodiscard]] bool occupied(uint32_t round) const;

  /// Room for `bytes` of each of `size` ranks in the cache lines of the round's word, where `rank`'s part begins: who
  /// sees that all have arrived has their data at hand. Null when there is too little room.
  [[nodiscard]] std::byte* beside(uint32_t round, uint32_t rank, uint32_t size, size_t bytes);

 private:
  struct alignas(128) Word {
    std::atomic<uint64_t> bits{0};
    std::array<std::byte, 120> payload;
  };
  static_assert(sizeof(Word) == 128);
  // From the top: round + 1 (20 bits), spoiled (1), number (20), instance (12), arrivals (11). Zero: before the first
  // round.
  struct Fields {
    uint32_t round, spoiled, number, instance, arrivals;
  };
  static Fields unpack(uint64_t bits);
  static uint64_t pack(const Fields& fields);
  static uint32_t tag(uint32_t round) { return (round + 1) & 0xfffff; }
  /// -1, 0 or 1: the word is of an earlier round, of this one, of a later one.
  static int compare(uint32_t word_tag, uint32_t round_tag);

  std::array<Word, kRounds> words_;
  alignas(128) std::atomic<uint32_t> suspended_{0};
};

}  // namespace farandole
