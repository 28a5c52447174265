#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/trace.h"

namespace farandole {

/// Spells what the traces of one rank's engines took as Chrome's trace events: JSON objects, one a line, a comma and a
/// line's end between two. One track per tensor. For one thread at a time.
class TraceText {
 public:
  explicit TraceText(int rank) : rank_(std::to_string(rank)) {}

  /// Sets the events that next() spells; `label` is put before the names of their tensors. Discards unread events.
  void take(TraceBatch batch, std::string_view label);

  /// The next events, of some hundred KiB; empty when there are none.
  [[nodiscard]] std::string next();

 private:
  struct Track {
    std::string number;
    std::string tensor;  // as JSON
  };
  [[nodiscard]] const Track& track_of(uint32_t name, std::string& out);
  void add(const TraceEvent& event, std::string& out);

  std::string rank_;
  std::string label_;
  TraceBatch batch_;
  size_t at_ = 0;                                  // in the batch
  std::vector<const Track*> of_names_;             // of the batch
  std::unordered_map<std::string, Track> tracks_;  // by what is shown
};

}  // namespace farandole
