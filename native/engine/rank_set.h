#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace farandole {

/// A set of ranks, 64 to a word. A union takes a few instructions even for thousands of ranks.
class RankSet {
 public:
  void add(int rank) {
    const auto word = static_cast<size_t>(rank) / 64;
    if (words_.size() <= word) words_.resize(word + 1);
    if (count_ == 0 || word < first_) first_ = word;
    const uint64_t bit = uint64_t{1} << (static_cast<unsigned>(rank) % 64);
    count_ += (words_[word] & bit) == 0 ? 1 : 0;
    words_[word] |= bit;
  }

  /// Adds the members of `other`. The sets must be disjoint.
  void add(const RankSet& other) {
    if (other.empty()) return;
    if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
    if (count_ == 0 || other.first_ < first_) first_ = other.first_;
    for (size_t word = other.first_; word < other.words_.size(); ++word) words_[word] |= other.words_[word];
    count_ += other.count_;
  }

  [[nodiscard]] bool has(int rank) const {
    const auto word = static_cast<size_t>(rank) / 64;
    return word < words_.size() && (words_[word] >> (static_cast<unsigned>(rank) % 64) & 1) != 0;
  }

  /// Returns whether the sets have a common member.
  [[nodiscard]] bool meets(const RankSet& other) const {
    for (size_t word = other.first_; word < other.words_.size() && word < words_.size(); ++word)
      if ((words_[word] & other.words_[word]) != 0) return true;
    return false;
  }

  [[nodiscard]] size_t count() const { return count_; }
  [[nodiscard]] bool empty() const { return count_ == 0; }

  /// Removes all members; keeps the memory.
  void clear() {
    for (uint64_t& word : words_) word = 0;
    count_ = 0;
  }

  /// Calls `visit(rank)` for each member, ascending.
  template <class Visit>
  void each(Visit visit) const {
    for (size_t word = 0; word < words_.size(); ++word)
      for (uint64_t left = words_[word]; left != 0; left &= left - 1)
        visit(static_cast<int>(64 * word + static_cast<size_t>(std::countr_zero(left))));
  }

 private:
  std::vector<uint64_t> words_;
  size_t first_ = 0;  // no word before this one has a member
  size_t count_ = 0;
};

}  // namespace farandole
