#include "base/error.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

namespace farandole {
namespace {

std::string quoted(const std::string& name) { return name.empty() ? "a collective" : "'" + name + "'"; }

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

std::string listed(const std::map<int, std::string>& asked) {
  std::string text;
  for (const auto& [rank, what] : asked) {
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + what;
  }
  return text;
}

std::string seconds(double waited) {
  char text[32];
  std::snprintf(text, sizeof text, waited < 10 ? "%.1f s" : "%.0f s", waited);
  return text;
}

}  // namespace

const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::Invalid: return "Invalid";
    case ErrorKind::Mismatch: return "Mismatch";
    case ErrorKind::Timeout: return "Timeout";
    case ErrorKind::PeerLost: return "PeerLost";
    case ErrorKind::Closed: return "Closed";
    case ErrorKind::Internal: return "Internal";
    case ErrorKind::Joined: return "Joined";
    case ErrorKind::Fabric: return "Fabric";
  }
  return "unknown";
}

int job_rank(int rank, const std::vector<int>& members) {
  const auto place = static_cast<size_t>(rank);
  return place < members.size() ? members[place] : rank;
}

Error::Error(ErrorKind kind, std::string name, const std::string& text)
    : std::runtime_error(text), kind(kind), name(std::move(name)) {}

Error Error::invalid(std::string name, std::string problem) {
  const std::string text = name.empty() ? problem : quoted(name) + ": " + problem;
  Error error(ErrorKind::Invalid, std::move(name), text);
  error.reason = std::move(problem);
  return error;
}

Error Error::mismatch(std::string name, std::string what, std::map<int, std::string> asked) {
  const std::string text = quoted(name) + " differs between ranks in its " + what + " (" + listed(asked) +
                           "); every rank must ask for the same";
  Error error(ErrorKind::Mismatch, std::move(name), text);
  error.what_differs = std::move(what);
  error.asked = std::move(asked);
  return error;
}

Error Error::timeout(std::string name, std::vector<int> missing, double waited) {
  const std::string who = missing.empty()       ? std::string("the peers made no progress")
                          : missing.size() == 1 ? "rank " + listed(missing) + " did not take part"
                                                : "ranks " + listed(missing) + " did not take part";
  const std::string text = quoted(name) + " waited " + seconds(waited) + ": " + who +
                           "; every rank must submit the same operations, or raise the collective timeout";
  Error error(ErrorKind::Timeout, std::move(name), text);
  error.ranks = std::move(missing);
  error.waited = waited;
  return error;
}

Error Error::peer_lost(std::string name, int rank, std::string reason) {
  const std::string text = quoted(name) + " failed: rank " + std::to_string(rank) + " is lost (" + reason +
                           "); its own output says why. Restart from the last checkpoint";
  Error error(ErrorKind::PeerLost, std::move(name), text);
  error.rank = rank;
  error.reason = std::move(reason);
  return error;
}

Error Error::closed(std::string reason) {
  const std::string text = "the engine is closed: " + reason;
  Error error(ErrorKind::Closed, "", text);
  error.reason = std::move(reason);
  return error;
}

Error Error::internal(std::string reason) {
  const std::string text = "internal error: " + reason + "; please report this";
  Error error(ErrorKind::Internal, "", text);
  error.reason = std::move(reason);
  return error;
}

Error Error::joined(std::string name, std::string problem) {
  const std::string text = quoted(name) + ": " + problem;
  Error error(ErrorKind::Joined, std::move(name), text);
  error.reason = std::move(problem);
  return error;
}

Error Error::fabric(std::string name, std::string problem) {
  const std::string text = quoted(name) + ": " + problem;
  Error error(ErrorKind::Fabric, std::move(name), text);
  error.reason = std::move(problem);
  return error;
}

Error Error::with(std::string name) const {
  switch (kind) {
    case ErrorKind::Invalid: return invalid(std::move(name), reason);
    case ErrorKind::Mismatch: return mismatch(std::move(name), what_differs, asked);
    case ErrorKind::Timeout: return timeout(std::move(name), ranks, waited);
    case ErrorKind::PeerLost: return peer_lost(std::move(name), rank, reason);
    case ErrorKind::Joined: return joined(std::move(name), reason);
    case ErrorKind::Fabric: return fabric(std::move(name), reason);
    case ErrorKind::Closed:
    case ErrorKind::Internal: break;
  }
  return *this;
}

Error Error::named(std::string name) const {
  Error error = with(std::move(name));
  error.process_set = process_set;
  return error;
}

Error Error::among(const std::string& process_set, const std::vector<int>& members) const {
  if (!this->process_set.empty() || process_set.empty()) return *this;
  const auto number = [&members](int rank) { return job_rank(rank, members); };
  Error error = *this;
  error.rank = number(rank);
  std::transform(ranks.begin(), ranks.end(), error.ranks.begin(), number);
  error.asked.clear();
  for (const auto& [rank, what] : asked) {
    // Mismatched roots are shown as ranks: "root 2".
    constexpr std::string_view kRoot = "root ";
    int root = 0;
    const bool names_root =
        what_differs == "root rank" && what.starts_with(kRoot) &&
        std::from_chars(what.data() + kRoot.size(), what.data() + what.size(), root).ec == std::errc{};
    error.asked.emplace(number(rank), names_root ? std::string(kRoot) + std::to_string(number(root)) : what);
  }
  error = kind == ErrorKind::Internal ? internal(reason + " (in " + process_set + ")") : error.with(name);
  error.process_set = process_set;
  return error;
}

}  // namespace farandole
