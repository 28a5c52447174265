#include "engine/failure_detector.h"

#include <sstream>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace farandole {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kExplanation = kSecond * 2 / 5;  // time for a report that explains a broken connection
constexpr uint64_t kHindsight = kSecond;            // time for ranks of other hosts to name the late ones
constexpr uint64_t kSilentCoordinator = 5 * kSecond;

uint64_t ns(nanoseconds span) { return static_cast<uint64_t>(span.count()); }

std::string text_of(nanoseconds span) {
  std::ostringstream text;
  text << seconds_of(ns(span)) << " s";
  return text.str();
}

}  // namespace

FailureDetector::FailureDetector(const Wiring& wiring, const EngineOptions& options, Pending& pending,
                                 ControlTree& control, Driver& driver)
    : wiring_(wiring),
      heartbeat_(options.heartbeat),
      timeout_(options.timeout),
      pending_(pending),
      control_(control),
      driver_(driver) {}

void FailureDetector::watch(const WiredWorld& wired) {
  looks_for_dead_ = !wired.world->notices_deaths();
  for (const TcpLink* link : wired.links) {
    links_.push_back({link, Silence(ns(heartbeat_))});
    links_.back().silence.note_life();  // a new connection counts as a sign of life
  }
}

std::string FailureDetector::reason_of(Abort::Reason reason) const {
  switch (reason) {
    case Abort::Reason::Died: return "its process was killed or crashed";
    case Abort::Reason::Left: return "it has shut down";
    case Abort::Reason::Unreachable: return "its connection broke";
    case Abort::Reason::Silent:
      return "no sign of life for " + text_of(heartbeat_) +
             ": its host is down or cannot be reached, or its process is stopped; if it may pause for so long, raise "
             "the setting 'heartbeat'";
    case Abort::Reason::Cut:
      return "no answer to data sent to it for " + text_of(heartbeat_) +
             ": packets between its host and another one are lost, as by a firewall or a broken cable";
    case Abort::Reason::Late:
      return "it did not do its part of an operation for " + text_of(timeout_) +
             ", the collective timeout: its process is stopped or hangs";
    case Abort::Reason::Failed:
    case Abort::Reason::Overdue: break;
  }
  return "it failed";
}

Error FailureDetector::lost(int rank, Abort::Reason reason) const {
  return Error::peer_lost("", rank, reason_of(reason));
}

/// Return the entry in the segment that reports `error` to the other ranks of this host.
Abort FailureDetector::abort_of(const Error& error) const {
  if (error.kind == ErrorKind::Closed) return {wiring_.rank, Abort::Reason::Left};
  if (error.kind == ErrorKind::Timeout && error.ranks.empty()) return {wiring_.rank, Abort::Reason::Overdue};
  if (error.kind == ErrorKind::Timeout) return {error.ranks.front(), Abort::Reason::Late};
  if (error.kind != ErrorKind::PeerLost) return {wiring_.rank, Abort::Reason::Failed};
  for (const auto reason : {Abort::Reason::Died, Abort::Reason::Left, Abort::Reason::Failed, Abort::Reason::Silent,
                            Abort::Reason::Cut, Abort::Reason::Late})
    if (error.reason == reason_of(reason)) return {error.rank, reason};
  return {error.rank, Abort::Reason::Unreachable};
}

/// Return the message that reports `error` to ranks of other hosts.
Departure FailureDetector::departure_of(const Error& error, const Abort& why) const {
  if (error.kind == ErrorKind::PeerLost) return {error.rank, false, error.reason};
  if (why.reason == Abort::Reason::Overdue) return {kNoRank, false, ""};
  if (why.reason == Abort::Reason::Late) return {why.rank, false, reason_of(why.reason)};
  return {wiring_.rank, false, std::string("it failed: ") + wiring_.in_job_ranks(error).what()};
}

std::optional<Error> FailureDetector::aborted() const {
  const auto abort = wiring_.segment->aborted();
  if (!abort) return std::nullopt;
  if (abort->reason == Abort::Reason::Overdue) return Error::timeout("", {}, seconds_of(ns(timeout_)));
  return lost(abort->rank, abort->reason);
}

std::optional<Error> FailureDetector::dead_local() const {
  for (size_t i = 0; i < wiring_.local_ranks.size(); ++i)
    if (wiring_.life(i).state() == Life::State::Dead) return lost(wiring_.local_ranks[i], Abort::Reason::Died);
  return std::nullopt;
}

/// Return the first lost rank among those with a control socket; life words cover the others.
std::optional<Error> FailureDetector::lost_remote() const {
  for (const ControlStream& stream : control_.streams()) {
    if (stream.fd() < 0 || control_.has_left(stream.peer())) continue;
    if (stream.lost()) return stream.lost();
    if (stream.silent()) return lost(stream.peer(), Abort::Reason::Silent);
  }
  return std::nullopt;
}

/// Return the ranks of this host whose processes are stopped.
std::vector<int> FailureDetector::stopped() const {
  std::vector<int> ranks;
  for (size_t i = 0; i < wiring_.local_ranks.size(); ++i)
    if (wiring_.life(i).is_stopped()) ranks.push_back(wiring_.local_ranks[i]);
  return ranks;
}

Error FailureDetector::root_cause(const Error& error) {
  if (error.kind != ErrorKind::PeerLost && error.kind != ErrorKind::Fabric) return error;
  if (control_.announced()) return *control_.announced();
  const uint64_t until = now_ns() + kExplanation;
  try {
    do {
      if (const auto known = aborted()) return *known;
      if (const auto dead = dead_local()) return *dead;  // a life word is proof and needs no explanation
      if (wiring_.remotes.empty()) return error;
      control_.receive();
      // A rank that ends because of another rank reports it before it closes its control connection.
      if (const auto gone = lost_remote()) return *gone;
      std::this_thread::sleep_for(milliseconds(1));
    } while (now_ns() < until);
  } catch (const Error& announced) {
    return announced;
  }
  // No report came. A stopped rank of this host could not pass it on, so name that rank.
  if (const auto ranks = stopped(); !ranks.empty()) return lost(ranks.front(), Abort::Reason::Silent);
  return error;
}

void FailureDetector::start_timeout(uint64_t now) { deadline_ns_ = timeout_.count() > 0 ? now + ns(timeout_) : 0; }

void FailureDetector::check() {
  if (const auto known = aborted()) throw *known;
  if (driver_.is_stopping()) throw Error::closed("it was shut down while this operation ran");
  if (looks_for_dead_)
    if (const auto dead = dead_local()) throw *dead;
  const uint64_t now = now_ns();
  if (deadline_ns_ != 0 && now > deadline_ns_) check_timeout(now);
  if (now > links_checked_ns_ + ns(heartbeat_) / 8) check_links(now);
  control_.flush();  // other ranks may wait for the rest of a plan that did not fit into their rings
  if (wiring_.remotes.empty()) return;
  control_.receive();  // a departure names the rank that is lost or has left
  control_.forward();
  if (const auto gone = lost_remote()) throw *gone;
}

/// Throw a timeout of the running operation that names the stopped ranks of this host. If there are none, first give
/// ranks of other hosts a moment to name theirs.
void FailureDetector::check_timeout(uint64_t now) const {
  std::vector<int> late = stopped();
  if (late.empty() && now < deadline_ns_ + kHindsight) return;
  throw Error::timeout("", std::move(late), seconds_of(ns(timeout_)));
}

/// Throw when a peer is cut off: its control connections may work while packets of its data links are lost. The kernel
/// reports unacknowledged data.
void FailureDetector::check_links(uint64_t now) {
  links_checked_ns_ = now;
  if (heartbeat_.count() == 0) return;
  for (WatchedLink& each : links_) {
    each.silence.look(now);
    if (!each.link->is_unanswered()) each.silence.note_life();
    else if (each.silence.is_over_limit()) throw lost(each.link->rank(), Abort::Reason::Cut);
  }
}

/// Throw when the coordinator lives but no longer answers. The negotiator itself fails operations that not all ranks
/// request.
void FailureDetector::check_overdue() {
  const uint64_t now = now_ns();
  if (timeout_.count() == 0 || now - overdue_checked_ns_ < kSecond) return;
  overdue_checked_ns_ = now;
  const uint64_t limit = ns(timeout_) + kSilentCoordinator;
  if (now < limit) return;
  if (const OperationPtr late = pending_.overdue(now - limit))
    throw Error::timeout(late->request.name, {0}, seconds_of(now - late->submitted_ns));
}

std::optional<Error> FailureDetector::find_lost() {
  if (const auto known = aborted()) throw *known;
  check_overdue();
  for (size_t i = 0; i < wiring_.local_ranks.size(); ++i)
    if (wiring_.life(i).state() == Life::State::Left) control_.note_departure(wiring_.local_ranks[i]);
  const auto dead = dead_local();
  return dead ? dead : lost_remote();
}

void FailureDetector::require_alive() const {
  pending_.require_open();
  if (const auto known = aborted()) throw wiring_.in_job_ranks(*known);
  if (const auto dead = dead_local()) throw wiring_.in_job_ranks(*dead);
}

bool FailureDetector::has_left(const Error& error) const {
  return error.kind == ErrorKind::Closed ||
         (error.kind == ErrorKind::PeerLost && error.reason == reason_of(Abort::Reason::Left));
}

void FailureDetector::poison(const Error& error) noexcept {
  if (failed_.exchange(true)) return;
  pending_.refuse(wiring_.in_job_ranks(error));
  const Abort why = abort_of(error);
  const Departure departure = departure_of(error, why);
  wiring_.segment->abort(why);
  control_.announce_failure(departure);
  fail_pending(error);
}

void FailureDetector::fail_pending(const Error& error) {
  for (const OperationPtr& operation : pending_.take_all()) driver_.fail(operation, error);
}

}  // namespace farandole
