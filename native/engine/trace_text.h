#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/trace.h"

namespace farandole {

/// Formats the traces of one rank's engines as Chrome's trace events: JSON objects, one per line, separated by commas.
/// One track per tensor. Use it on one thread at a time.
class TraceText {
 public:
  explicit TraceText(int rank) : rank_(std::to_string(rank)) {}

  /// Sets the batch for next(), and discards unread events; `label` prefixes the names of the tensors.
  void take(TraceBatch batch, std::string_view label);

  /// Returns the next events, some hundred KiB; empty at the end.
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
  std::unordered_map<std::string, Track> tracks_;  // by shown name
};

}  // namespace farandole
