// The one exception type of the native core. It crosses threads by value; one translator raises it in Python.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace farandole {

enum class ErrorKind : uint8_t {
  Invalid,   // the request is refused: `name`, `reason`
  Mismatch,  // requests differ between ranks: `name`, `what_differs`, `asked`
  Timeout,   // some ranks are missing: `name`, `ranks`, `waited`
  PeerLost,  // a rank is lost: `name`, `rank`, `reason`
  Closed,    // submitted after the engine closed or failed: `reason`
  Internal,  // an invariant of the core is broken: `reason`
  Joined,    // the operation cannot run without a joined rank: `name`, `reason`
  Fabric,    // a library that carries the data, such as MPI, has failed: `name`, `reason`
};

// The Python class for `kind`, such as "PeerLost".
[[nodiscard]] const char* name_of(ErrorKind kind);

// The job's number of rank `rank` of a process set, whose ranks have these numbers; without `members`, `rank` itself.
[[nodiscard]] int job_rank(int rank, const std::vector<int>& members);

// A failure with its fields; `what()` is the message for users. Fields that the kind does not use keep their defaults.
class Error : public std::runtime_error {
 public:
  [[nodiscard]] static Error invalid(std::string name, std::string problem);
  [[nodiscard]] static Error mismatch(std::string name, std::string what, std::map<int, std::string> asked);
  [[nodiscard]] static Error timeout(std::string name, std::vector<int> missing, double waited);
  [[nodiscard]] static Error peer_lost(std::string name, int rank, std::string reason);
  [[nodiscard]] static Error closed(std::string reason);
  [[nodiscard]] static Error internal(std::string reason);
  [[nodiscard]] static Error joined(std::string name, std::string problem);
  [[nodiscard]] static Error fabric(std::string name, std::string problem);

  // A copy that names the tensor. Transports do not know the name when they throw.
  [[nodiscard]] Error named(std::string name) const;

  // A copy for a process set: `members[r]` is the job's number of the set's rank r. An error that has a process set
  // already is returned unchanged.
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
  [[nodiscard]] Error with(std::string name) const;  // a copy with another name
};

}  // namespace farandole
