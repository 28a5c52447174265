#include <algorithm>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "engine/engine.h"

// How an engine notices that ranks are lost, and how it tells.
namespace farandole {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kHearsay{400};           // for news that explain a broken connection
constexpr uint64_t kHindsight = 1'000'000'000;  // ns, for those who can see who is to blame for a timeout

std::string text_of(nanoseconds span) {
  std::ostringstream text;
  text << seconds_of(static_cast<uint64_t>(span.count())) << " s";
  return text.str();
}

}  // namespace

std::string Engine::reason_of(Abort::Reason reason) const {
  switch (reason) {
    case Abort::Reason::Died: return "its process was killed or crashed";
    case Abort::Reason::Left: return "it has shut down";
    case Abort::Reason::Unreachable: return "its connection broke";
    case Abort::Reason::Silent:
      return "no sign of life for " + text_of(options_.heartbeat) +
             ": its host is down or cannot be reached, or its process is stopped; if it may pause for so long, raise "
             "the setting 'heartbeat'";
    case Abort::Reason::Cut:
      return "no answer to data sent to it for " + text_of(options_.heartbeat) +
             ": packets between its host and another one are lost, as by a firewall or a broken cable";
    case Abort::Reason::Late:
      return "it did not do its part of an operation for " + text_of(options_.timeout) +
             ", the collective timeout: its process is stopped or hangs";
    case Abort::Reason::Failed: break;
  }
  return "it failed";
}

/// What to tell the other ranks of this host about `error`.
Abort Engine::abort_of(const Error& error) const {
  if (error.kind == ErrorKind::Closed) return {wiring_.rank, Abort::Reason::Left};
  if (error.kind == ErrorKind::Timeout && !error.ranks.empty()) return {error.ranks.front(), Abort::Reason::Late};
  if (error.kind != ErrorKind::PeerLost) return {wiring_.rank, Abort::Reason::Failed};
  for (const auto reason : {Abort::Reason::Died, Abort::Reason::Left, Abort::Reason::Failed, Abort::Reason::Silent,
                            Abort::Reason::Cut, Abort::Reason::Late})
    if (error.reason == reason_of(reason)) return {error.rank, reason};
  return {error.rank, Abort::Reason::Unreachable};
}

Error Engine::root_cause(const Error& error) {
  if (error.kind != ErrorKind::PeerLost) return error;
  if (verdict_) return *verdict_;
  // A peer that is gone may only have given up because of a third rank.
  const uint64_t until = now_ns() + static_cast<uint64_t>(nanoseconds(kHearsay).count());
  try {
    do {
      if (const auto abort = wiring_.segment->aborted())
        return Error::peer_lost("", abort->rank, reason_of(abort->reason));
      // A life word is proof: nothing has to explain it.
      for (size_t i = 0; i < wiring_.local_ranks.size(); ++i) {
        const Life::State state = wiring_.segment->area(static_cast<int>(i)).life.state();
        if (state == Life::State::Dead)
          return Error::peer_lost("", wiring_.local_ranks[i], farandole::reason_of(state));
      }
      if (wiring_.remotes.empty()) return error;
      hear();
      // Who gives up because of another says so before it ends its control connection.
      if (const auto lost = lost_remote()) return *lost;
      std::this_thread::sleep_for(milliseconds(1));
    } while (now_ns() < until);
  } catch (const Error& told) {
    return told;
  }
  // Through it this rank would have heard why.
  for (size_t i = 0; i < wiring_.local_ranks.size(); ++i)
    if (wiring_.segment->area(static_cast<int>(i)).life.is_stopped())
      return Error::peer_lost("", wiring_.local_ranks[i], reason_of(Abort::Reason::Silent));
  return error;
}

void Engine::check() {
  if (const auto abort = wiring_.segment->aborted()) throw Error::peer_lost("", abort->rank, reason_of(abort->reason));
  if (stop_.load()) throw Error::closed("it was shut down while this operation ran");
  const uint64_t now = now_ns();
  if (operation_deadline_ns_ != 0 && now > operation_deadline_ns_) look_for_stopped(now);
  if (now > links_looked_ns_ + static_cast<uint64_t>(options_.heartbeat.count()) / 8) look_for_cut(now);
  // The others may wait for the rest of a plan that did not fit into their rings.
  for (ControlStream& control : controls_) control.flush();
  if (!listens_always_) return;
  hear();  // a farewell names the guilty rank
  if (!leads()) forward();
  if (const auto lost = lost_remote()) throw *lost;
}

/// The operation that runs has taken too long: who of this host is stopped is to blame. The others give them a moment
/// to say so, because nobody can see who is stopped on another host.
void Engine::look_for_stopped(uint64_t now) {
  std::vector<int> stopped;
  for (size_t i = 0; i < wiring_.local_ranks.size(); ++i)
    if (wiring_.segment->area(static_cast<int>(i)).life.is_stopped()) stopped.push_back(wiring_.local_ranks[i]);
  if (stopped.empty() && now < operation_deadline_ns_ + kHindsight) return;
  throw Error::timeout("", std::move(stopped), seconds_of(static_cast<uint64_t>(options_.timeout.count())));
}

/// A host may reach the others of its control connections, but not one that it exchanges data with. The kernel knows:
/// what we send there is not acknowledged.
void Engine::look_for_cut(uint64_t now) {
  links_looked_ns_ = now;
  if (options_.heartbeat.count() == 0) return;
  for (DataLink& each : data_links_) {
    each.silence.look(now);
    if (!each.link->is_unanswered()) each.silence.hear();
    else if (each.silence.is_over_limit()) throw Error::peer_lost("", each.link->rank(), reason_of(Abort::Reason::Cut));
  }
}

void Engine::require_alive() {
  require_own_process("require_alive");
  pending_.require_open();
  if (const auto abort = wiring_.segment->aborted())
    throw told(Error::peer_lost("", abort->rank, reason_of(abort->reason)));
  for (size_t i = 0; i < wiring_.local_ranks.size(); ++i) {
    const Life::State state = wiring_.segment->area(static_cast<int>(i)).life.state();
    if (state == Life::State::Dead)
      throw told(Error::peer_lost("", wiring_.local_ranks[i], farandole::reason_of(state)));
  }
}

std::optional<Error> Engine::lost_remote() const {
  // Peers in memory are known by their life words.
  for (const ControlStream& control : controls_) {
    if (control.fd() < 0 || left_[static_cast<size_t>(control.peer())]) continue;
    if (control.lost()) return control.lost();
    if (control.silent()) return Error::peer_lost("", control.peer(), reason_of(Abort::Reason::Silent));
  }
  return std::nullopt;
}

void Engine::look_for_lost() {
  try {
    if (const auto abort = wiring_.segment->aborted())
      throw Error::peer_lost("", abort->rank, reason_of(abort->reason));
    look_for_overdue();
    std::optional<Error> lost;
    for (size_t i = 0; i < wiring_.local_ranks.size(); ++i) {
      const int rank = wiring_.local_ranks[i];
      const Life::State state = wiring_.segment->area(static_cast<int>(i)).life.state();
      const bool is_neighbor = tree_.parent(wiring_.rank) == rank || tree_.parent(rank) == wiring_.rank;
      if (state == Life::State::Left && is_neighbor) left_[static_cast<size_t>(rank)] = true;
      if (state == Life::State::Dead) lost = Error::peer_lost("", rank, farandole::reason_of(state));
    }
    if (!lost) lost = lost_remote();
    look_for_left();
    if (!lost) return;
    // What the lost rank said before it went still counts: only what is pending after that has failed.
    while (drive_once()) {
    }
    // Who connects hosts tells the others also when it has nothing to lose itself.
    if (!pending_.empty() || listens_always_) throw *lost;
  } catch (const Error& error) {
    poison(error);
  } catch (const std::exception& error) {
    poison(Error::internal(error.what()));
  }
}

/// Who has shut down said what it had to say before: that is heard first. When it is the parent, there is no way to the
/// coordinator any more, and what is pending can never run.
void Engine::look_for_left() {
  for (const ControlStream& control : controls_) {
    const int peer = control.peer();
    const auto at = static_cast<size_t>(peer);
    if (!left_[at] || (told_[at] && !is_parent(control))) continue;
    while (drive_once()) {
    }
    if (!is_parent(control)) {
      part_with(peer, peer);
      continue;
    }
    const int first = first_left_.value_or(peer);
    if (!told_[at]) tell_children(Farewell{peer, true, reason_of(Abort::Reason::Left), first});
    told_[at] = true;
    if (!pending_.empty()) throw Error::peer_lost("", first, reason_of(Abort::Reason::Left));
  }
}

void Engine::look_for_overdue() {
  // The negotiator fails what not all ranks ask for; this is for a coordinator that lives but no longer answers.
  constexpr uint64_t kSecond = 1'000'000'000;
  const auto timeout = static_cast<uint64_t>(options_.timeout.count());
  const uint64_t now = now_ns();
  if (timeout == 0 || now - looked_ns_ < kSecond) return;
  looked_ns_ = now;
  if (now < timeout + 5 * kSecond) return;
  if (const OperationPtr late = pending_.overdue(now - timeout - 5 * kSecond))
    throw Error::timeout(late->request.name, {0}, seconds_of(now - late->submitted_ns));
}

void Engine::look_for_stalls(double now) {
  const double limit = seconds_of(static_cast<uint64_t>(options_.stall.count()));
  if (limit == 0 || now - stalls_looked_ < std::min(0.5, limit / 4)) return;
  stalls_looked_ = now;
  auto found = negotiator_.waiting() > 0 ? negotiator_.stalls(now - limit) : std::vector<Negotiator::Stall>();
  for (Negotiator::Stall& stall : found)
    for (auto* ranks : {&stall.asked, &stall.missing})
      for (int& rank : *ranks)
        if (!wiring_.members.empty()) rank = wiring_.members[static_cast<size_t>(rank)];
  const std::lock_guard lock(stats_mu_);
  stalls_ = std::move(found);
}

std::vector<Negotiator::Stall> Engine::stalls() {
  if (closed_.load() || failed_.load()) return {};
  const std::lock_guard lock(stats_mu_);
  return stalls_;
}

void Engine::poison(Error error) noexcept {
  if (failed_.exchange(true)) return;
  pending_.refuse(told(error));
  const Abort why = abort_of(error);
  const Farewell farewell = error.kind == ErrorKind::PeerLost ? Farewell{error.rank, false, error.reason}
                            : why.reason == Abort::Reason::Late
                                ? Farewell{why.rank, false, reason_of(why.reason)}
                                : Farewell{wiring_.rank, false, std::string("it failed: ") + told(error).what()};
  wiring_.segment->abort(why);
  for (ControlStream& control : controls_)
    if (control.fd() >= 0) control.send(farewell);
  fail_pending(error);
}

void Engine::fail_pending(const Error& error) {
  for (const OperationPtr& operation : pending_.take_all()) fail(operation, error);
}

}  // namespace farandole
