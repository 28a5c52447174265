"""Decisions of an elastic job's launcher, without sockets, threads or clocks.

A member is a process that the launcher has started, with a number for life. The members that take part in a generation
have ranks in it. When one of them is lost, or hosts come or go, the others come back for a place, and the roster forms
the next generation of those that are there. Times are in seconds of one clock."""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from farandole.launch.backend import Host
from farandole.launch.failures import Failure, culprit

# A newcomer that is ready waits so long for others that are still starting, so that ranks are interrupted once.
GATHER = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The user's limits of an elastic job; durations in seconds."""

    least: int
    most: int
    wanted: int  # ranks that the first generation waits for, up to `start`
    start: float
    patience: float  # for at least `least` ranks, and for ranks that do not come back for a place
    resets: int | None  # generations after the first one
    cooldown: tuple[float, float]  # a host's rest after its first failure, and the longest one


@dataclass(frozen=True, slots=True)
class Start:
    """Start member `number` on `host`, in the slot `slot` of it: its local rank for life."""

    number: int
    host: Host
    slot: int


@dataclass(frozen=True, slots=True)
class Form:
    """Form `generation` of these members; their ranks are their places in the list."""

    generation: int
    members: tuple[int, ...]
    slots: tuple[int, ...]  # of each member on its host


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell these members that hosts have changed; they come back for a place when their program looks."""

    members: tuple[int, ...]
    added: bool
    removed: bool


@dataclass(frozen=True, slots=True)
class End:
    """End member `number`: it has no place any more, or does not answer."""

    number: int
    why: str
    at_once: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of the job: well, with the members of its last generation, or with a failure."""

    failure: Failure | None
    problem: str = ""  # a limit that was reached
    members: tuple[int, ...] = ()


Action: TypeAlias = Start | Form | Tell | End | Outcome


@dataclass(slots=True)
class _Member:
    number: int
    host: str
    slot: int
    since: float  # of its phase
    phase: Literal["starting", "waiting", "placed"] = "starting"
    commits: int = -1  # of the state that it holds; -1: it has none
    rank: int | None = None  # in the latest generation that it was a part of
    told: bool = False  # of newcomers, or of its own removal, since it was placed
    leaving: bool = False  # its host is gone, or has fewer slots
    ended: bool = False  # it was told to end


@dataclass(slots=True)
class _Rest:
    """A host's failures, and the end of its rest."""

    failures: int = 0
    until: float = 0.0


@dataclass(slots=True)
class Roster:
    """The members of a job. Events change it; `step` returns what is to be done now."""

    limits: Limits
    generation: int = -1
    _hosts: dict[str, Host] = field(default_factory=dict)
    _members: dict[int, _Member] = field(default_factory=dict)
    _rests: dict[str, _Rest] = field(default_factory=dict)
    _number: int = 0
    _formed: tuple[int, ...] = ()  # the members of the latest generation
    _failures: dict[int, Failure] = field(default_factory=dict)  # by member, since the latest generation was formed
    _short: float | None = None  # the time since which too few members are there
    _held: bool = False  # a member has come back with a state, which must not be lost
    _finished: bool = False  # a member has ended well, so no further generation is formed
    _stepped: float = -math.inf  # the time of the last step
    _jitter: random.Random = field(default_factory=random.Random)

    # --- events

    def find_hosts(self, hosts: Sequence[Host]) -> None:
        """Take note of the hosts that there are now; a host that is gone and comes back has no failures any more."""
        now = {host.name: host for host in hosts}
        for name in [name for name in self._rests if name not in now]:
            del self._rests[name]
        # Hosts that stay keep their order.
        kept = {name: now[name] for name in self._hosts if name in now}
        self._hosts = kept | {name: host for name, host in now.items() if name not in kept}
        for name in {member.host for member in self._members.values()}:
            here = [each for each in self._members.values() if each.host == name]
            slots = self._hosts[name].slots if name in self._hosts else 0
            for member in here:
                member.leaving = member.leaving or member.slot >= slots

    def expect(self, number: int, host: str, slot: int, now: float) -> None:
        """Expect the call of a member of an earlier launcher, which trains if it is still there."""
        member = self._members.setdefault(number, _Member(number, host, slot, now))
        member.phase, member.rank, self._number = "placed", number, max(self._number, number + 1)
        self.generation = max(self.generation, 0)

    def adopt(self, number: int, host: str, slot: int, rank: int, generation: int, now: float) -> None:
        """Take over a member of an earlier launcher that has called, and trains as a rank of `generation`."""
        self.expect(number, host, slot, now)
        self._members[number].rank, self.generation = rank, max(self.generation, generation)
        self._formed = tuple(sorted({*self._formed, number}))

    def come(self, number: int, commits: int, now: float) -> None:
        """Note that a member waits for a place, with the state of so many commits (-1: with none)."""
        member = self._members.get(number)
        if member is not None:
            member.phase, member.commits, member.since = "waiting", commits, now
            self._held = self._held or commits >= 0

    def lose(self, number: int, failure: Failure | None, now: float) -> None:
        """Note the end of a member's process: its failure, or None if it has ended well.

        A newcomer that ends before it has a place does not end the training, even if it ends well."""
        is_early = self.is_newcomer(number)
        member = self._members.pop(number, None)
        if member is None:
            return
        if failure is None and not is_early:
            self._finished = self._finished or not member.ended
        elif not member.leaving:
            if failure is not None:
                self._failures[number] = failure
            if failure is None or not failure.consequence:
                self.rest(member.host, now)

    def forget(self, number: int) -> None:
        """Forget a member that was never started."""
        self._members.pop(number, None)

    def rest(self, host: str, now: float) -> None:
        """Start no member on `host` for a while, longer with each failure, or never again."""
        rest = self._rests.setdefault(host, _Rest())
        rest.failures += 1
        least, most = self.limits.cooldown
        seconds = min(most, least * 2.0 ** min(rest.failures - 1, 30)) * self._jitter.uniform(1.0, 1.25)
        rest.until = now + min(most, seconds)

    # --- questions

    def is_newcomer(self, number: int) -> bool:
        """Return whether the member may still get its first place in a job that has begun to train."""
        member = self._members.get(number)
        return member is not None and member.rank is None and not member.ended and self.generation >= 0

    def is_ending(self, number: int) -> bool:
        """Return whether the member was told to end and has not ended yet."""
        return number in self._members and self._members[number].ended

    @property
    def training(self) -> list[int]:
        """The members that have a rank in the latest generation."""
        return [member.number for member in self._members.values() if member.phase == "placed"]

    @property
    def is_awaited(self) -> bool:
        """Whether members that have come for a place wait for those that train."""
        return self._first_wait() is not None

    @property
    def live(self) -> list[int]:
        """The members whose processes have not ended."""
        return list(self._members)

    def expected(self, number: int) -> tuple[int, list[str]]:
        """Return the rank that a new member may get, and the host of each rank: what is known when it starts."""
        live = _in_order(member for member in self._members.values() if not member.leaving)
        return [member.number for member in live].index(number), [member.host for member in live]

    def next_time(self) -> float | None:
        """Return the time after the last step at which `step` may have something to do without an event; None: never.

        A time that has passed is none: the caller would step again and again until the next event."""
        times = [rest.until for rest in self._rests.values()]
        first = self._first_wait()
        if first is not None:
            times += [first + GATHER, first + self._patience]
        if self._short is not None:
            times.append(self._short + self.limits.patience)
        return min((each for each in times if each > self._stepped), default=None)

    # --- decisions

    def step(self, now: float) -> list[Action]:
        """Return what is to be done now, in order. An `Outcome` is the last action of a job."""
        self._stepped = now
        outcome = self._outcome(now)
        if outcome is not None:
            return [outcome]
        if self._finished:
            return list(self._dismiss())
        return [*self._retire(now), *self._start(now), *self._form(now), *self._tell(now)]

    def _outcome(self, now: float) -> Outcome | None:
        failed = [failure for number, failure in self._failures.items() if number in self._formed]
        if self._finished and self.generation < 0 and self._first_wait() is not None:
            return Outcome(None, "a process has ended well and never called init(), for which others wait")
        if self._finished:
            return None if self._members else Outcome(culprit(failed) if failed else None, members=self._formed)
        if self.generation < 0 and self._failures and len(self._failures) >= min(self._number, self.limits.wanted):
            return Outcome(self._culprit())
        if self.generation >= 0 and not self._may_have_state():
            return Outcome(self._culprit(), "no rank is left that has the state of the training")
        if self._short is not None and now >= self._short + self.limits.patience:
            return self._too_few(now - self._short)
        limit = self.limits.resets
        if limit is not None and self.generation >= limit and self._may_form() is not None:
            return Outcome(self._culprit(), f"the number of resets has exceeded the limit of {limit} (--reset-limit)")
        return None

    def _may_have_state(self) -> bool:
        """Return whether a member has the state of the training, or still trains with it."""
        trained = [member for member in self._members.values() if member.rank is not None]
        return any(member.phase == "placed" or member.commits >= 0 or not self._held for member in trained)

    def _too_few(self, waited: float) -> Outcome:
        there, slots = len(self._members), sum(host.slots for host in self._hosts.values())
        problem = (
            f"{there} ranks are there, in {slots} slots, and {self.limits.least} are needed (--min-np): waited "
            f"{waited:.3g} s (--elastic-timeout)"
        )
        return Outcome(self._culprit(), problem)

    def _culprit(self) -> Failure | None:
        return culprit(list(self._failures.values())) if self._failures else None

    def _dismiss(self) -> Iterator[Action]:
        """End the members that wait for a place: the job has ended well. Before the first generation none does."""
        for member in list(self._members.values()) if self.generation >= 0 else ():
            if member.phase != "placed" and not member.ended:
                member.ended = member.leaving = True
                yield End(member.number, "the training has ended", at_once=False)

    def _retire(self, now: float) -> Iterator[Action]:
        """End members without a slot and state, and members that others have waited for in vain."""
        first, patience = self._first_wait(), self._patience
        for member in list(self._members.values()):
            if member.leaving and member.phase != "placed" and member.commits < 0:
                yield from self._send_away(member)
            elif first is not None and now >= first + patience and self._holds_up(member):
                yield from self.give_up(member.number, f"did not come for its place within {patience:.3g} s", now)

    @staticmethod
    def _send_away(member: _Member) -> Iterator[End]:
        if not member.ended:
            member.ended = True
            yield End(member.number, f"its slot on {member.host} is gone", at_once=False)

    @property
    def _patience(self) -> float:
        return self.limits.start if self.generation < 0 else self.limits.patience

    def _holds_up(self, member: _Member) -> bool:
        """Return whether members that wait for the next generation wait for this one."""
        return member.phase == "placed" or (member.phase == "starting" and self.generation < 0)

    def _first_wait(self) -> float | None:
        # One that was told to end waits no more, although its process may still be there.
        waiting = [each for each in self._members.values() if each.phase == "waiting" and not each.ended]
        return min((each.since for each in waiting), default=None)

    def give_up(self, number: int, why: str, now: float) -> Iterator[End]:
        """Count a member as lost although its process may still be there, and end that."""
        failure = Failure(rank=number, reason=why, code=255, at=now, killed=True)
        self.lose(number, failure, now)
        yield End(number, why, at_once=True)

    def _start(self, now: float) -> Iterator[Action]:
        room = self.limits.most - len([member for member in self._members.values() if not member.leaving])
        for host in self._hosts.values():
            if host.name in self._rests and now < self._rests[host.name].until:
                continue
            taken = {member.slot for member in self._members.values() if member.host == host.name}
            for slot in sorted(set(range(host.slots)) - taken)[: max(0, room)]:
                self._members[self._number] = _Member(self._number, host.name, slot, now)
                yield Start(self._number, host, slot)
                self._number += 1
                room -= 1

    def _may_form(self) -> list[_Member] | None:
        """Return the members of the next generation, in the order of their ranks; None while others are awaited."""
        waiting = [each for each in self._members.values() if each.phase == "waiting"]
        holders = [each for each in waiting if each.commits >= 0]
        if any(each.phase == "placed" and not (each.leaving and holders) for each in self._members.values()):
            return None
        # Members without a slot go on if the state would be lost with them.
        is_safe = any(not each.leaving for each in holders)
        ready = [each for each in waiting if not each.leaving or (each.commits >= 0 and not is_safe)]
        return _in_order(ready)[: self.limits.most] if len(ready) >= self.limits.least else None

    def _form(self, now: float) -> Iterator[Action]:
        ready = self._may_form()
        if ready is None or self._gathers(len(ready), now):
            few = len([each for each in self._members.values() if not each.leaving]) < self.limits.least
            self._short = (now if self._short is None else self._short) if few else None
            return
        self._short, self.generation = None, self.generation + 1
        self._failures.clear()
        self._formed = tuple(member.number for member in ready)
        for rank, member in enumerate(ready):
            member.phase, member.rank, member.since, member.told = "placed", rank, now, False
        yield Form(self.generation, self._formed, tuple(member.slot for member in ready))
        for member in list(self._members.values()):
            if member.leaving and member.number not in self._formed:
                if member.phase == "placed":
                    yield from self.give_up(member.number, f"its slot on {member.host} is gone", now)
                else:
                    yield from self._send_away(member)

    def _gathers(self, ready: int, now: float) -> bool:
        """Return whether the first generation still waits for more ranks."""
        first = self._first_wait()
        if self.generation >= 0 or first is None:
            return False
        return ready < self.limits.wanted and now < first + self.limits.start

    def _tell(self, now: float) -> Iterator[Action]:
        """Tell a running generation that members are ready to join it, or that some must leave."""
        placed = [member for member in self._members.values() if member.phase == "placed"]
        newcomers = [each for each in self._members.values() if each.phase == "waiting" and not each.leaving]
        starting = any(each.phase == "starting" for each in self._members.values())
        due = bool(newcomers) and (not starting or now >= min(each.since for each in newcomers) + GATHER)
        # A member that has come back after a loss waits for the others: no news for them.
        added = due and all(member.rank is None for member in newcomers)
        leaving = [member for member in placed if member.leaving]
        removed = 0 < len(leaving) < len(placed)  # the last ones with the state wait for newcomers
        untold = tuple(member.number for member in placed if not member.told)
        if untold and (added or removed):
            for member in placed:
                member.told = True
            yield Tell(untold, added, removed)


def _in_order(members: Iterable[_Member]) -> list[_Member]:
    """Return these members in the order of their ranks: the newest state first, each host's together.

    Members that had ranks keep their order; hosts follow their first member."""

    def key(member: _Member) -> tuple[int, float, int]:
        return -member.commits, float("inf") if member.rank is None else member.rank, member.number

    order = sorted(members, key=key)
    hosts = list(dict.fromkeys(member.host for member in order))
    return sorted(order, key=lambda member: hosts.index(member.host))
