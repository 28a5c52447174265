// The one exception type of the native core; it crosses threads by value and Python by one translator.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace farandole {

enum class ErrorKind : uint8_t {
  Invalid,   // refused where it was asked for: `name`, `reason`
  Mismatch,  // ranks asked for different things: `name`, `what_differs`, `asked`
  Timeout,   // not every rank came: `name`, `ranks`, `waited`
  PeerLost,  // a rank is gone: `name`, `rank`, `reason`
  Closed,    // submitted after the end, or after the failure it names: `reason`
  Internal,  // our own invariant broke: `reason`
  Joined,    // it cannot run without a rank that has joined: `name`, `reason`
};

// The name of `kind` as Python's errors spell it, such as "PeerLost".
[[nodiscard]] const char* name_of(ErrorKind kind);

// A failure with its fields; `what()` is the whole sentence for people.
// Fields that the kind does not use stay at their defaults.
class Error : public std::runtime_error {
 public:
  [[nodiscard]] static Error invalid(std::string name, std::string problem);
  [[nodiscard]] static Error mismatch(std::string name, std::string what, std::map<int, std::string> asked);
  [[nodiscard]] static Error timeout(std::string name, std::vector<int> missing, double waited);
  [[nodiscard]] static Error peer_lost(std::string name, int rank, std::string reason);
  [[nodiscard]] static Error closed(std::string reason);
  [[nodiscard]] static Error internal(std::string reason);
  [[nodiscard]] static Error joined(std::string name, std::string problem);

  // The same failure, said of the tensor `name`: transports do not know whose bytes they carry.
  [[nodiscard]] Error named(std::string name) const;

  // The same failure, said of some of the job's ranks: `members` are the numbers in the job of the ranks that it
  // counts from 0. An error that was said of some ranks already stays as it is.
  [[nodiscard]] Error among(const std::string& process_set, const std::vector<int>& members) const;

  ErrorKind kind;
  std::string name;
  std::string reason;
  int rank = -1;
  std::vector<int> ranks;
  double waited = 0;  // seconds
  std::string what_differs;
  std::map<int, std::string> asked;
  std::string process_set;  // empty: all ranks of the job

 private:
  Error(ErrorKind kind, std::string name, const std::string& text);
  [[nodiscard]] Error with(std::string name) const;  // of the same fields
};

}  // namespace farandole
