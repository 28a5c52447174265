#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace farandole {

/// Agreement among the ranks of one host without the coordinator: all of them are about to run the same operation, and
/// have nothing else under way. Each round has one word in shared memory, so agreeing and spoiling exclude each other.
///
/// A round is agreed when all ranks have arrived with the same number. It is spoiled when a rank arrives with another
/// number, gives up, or asks the coordinator for anything; then all ranks ask the coordinator. A rank that comes late
/// to a spoiled round moves on to the next.
class LaneRounds {
 public:
  static constexpr uint32_t kRounds = 8;  // words in use; round r uses the word of round r - kRounds again
  static constexpr uint32_t kMostNumbers = 1u << 20;
  static constexpr uint32_t kMostRanks = (1u << 11) - 1;

  enum class Arrival {
    Waiting,  // this rank was added
    Missed,   // the round was spoiled in an earlier operation; try the next
    Refused,  // the round is spoiled for this operation; ask the coordinator
  };
  /// Adds this rank to `round` for operation `number`. `instance` counts the operations that all ranks have run before.
  /// It distinguishes a recurring name from its earlier uses, so that an old spoiled round does not count.
  Arrival arrive(uint32_t round, uint32_t number, uint32_t instance);

  enum class State { Open, Agreed, Spoiled };
  [[nodiscard]] State state(uint32_t round, uint32_t size) const;

  /// Spoils `round` unless it is agreed. Returns its state.
  State spoil(uint32_t round, uint32_t size);

  /// Stops waiting in every round until resume() is called as often. A joined rank never arrives.
  void suspend() { suspended_.fetch_add(1, std::memory_order_relaxed); }
  void resume() { suspended_.fetch_sub(1, std::memory_order_relaxed); }
  [[nodiscard]] bool suspended() const { return suspended_.load(std::memory_order_relaxed) != 0; }

  /// Returns whether a rank waits in `round`.
  [[nodiscard]] bool occupied(uint32_t round) const;

  /// The place for `bytes` of data of `rank`, among `size` ranks, in the cache lines of the round's word. Reading the
  /// word thus fetches the data as well. Null when the data does not fit.
  [[nodiscard]] std::byte* beside(uint32_t round, uint32_t rank, uint32_t size, size_t bytes);

 private:
  struct alignas(128) Word {
    std::atomic<uint64_t> bits{0};
    std::array<std::byte, 120> payload;
  };
  static_assert(sizeof(Word) == 128);
  // From the top: round + 1 (20 bits), spoiled (1), number (20), instance (12), arrivals (11). Zero means that no round
  // has used the word yet.
  struct Fields {
    uint32_t round, spoiled, number, instance, arrivals;
  };
  static Fields unpack(uint64_t bits);
  static uint64_t pack(const Fields& fields);
  static uint32_t tag(uint32_t round) { return (round + 1) & 0xfffff; }
  /// Returns -1, 0 or 1: the word belongs to an earlier round, to this one, to a later one.
  static int compare(uint32_t word_tag, uint32_t round_tag);

  std::array<Word, kRounds> words_;
  alignas(128) std::atomic<uint32_t> suspended_{0};
};

}  // namespace farandole
