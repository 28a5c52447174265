"""An elastic job: members are started, lost and replaced, and generations of ranks formed of those that are there."""

import contextlib
import functools
import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from typing import TypedDict

from farandole.cores import threads_per_rank
from farandole.launch.backend import Agent, Assignment, Backend, Host, OnLine, Rank, Task
from farandole.launch.elastic.hosts import Agents, Found, HostDiscovery, Opened, OpenedAgent, Watch, log_hosts
from farandole.launch.elastic.joining import Adopted, Record, end_without_launcher
from farandole.launch.elastic.members import Came, Left, Members, Returned
from farandole.launch.elastic.roster import End, Form, Limits, Outcome, Roster, Start, Tell
from farandole.launch.elastic.silence import PING_EVERY, why_lost
from farandole.launch.failures import Failure
from farandole.launch.hosts import is_local
from farandole.launch.job import GONE
from farandole.launch.processes import GRACE
from farandole.meeting.handshake import new_secret
from farandole.meeting.launched.elastic import MemberEnvironment, show_place
from farandole.meeting.launched.elastic_messages import Back, Hosts, Leave, Place
from farandole.meeting.rendezvous import RendezvousServer
from farandole.other_launchers import note_launches
from farandole.topology import OF_ONE_PROCESS, TORCH_PLACES, Topology

log = logging.getLogger(__name__)

STILL = 4  # answers of a rank that has finished no operation meanwhile: it seems to wait for others
LOST_HOST = 255  # code of a member whose host is lost
LEAVE = 10.0  # seconds for a member that was told to end
RETURN = 15.0  # seconds for the members of a lost launcher to call this one


@dataclass(frozen=True, slots=True)
class _Ended:
    """Event: a member's process has ended."""

    number: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class _Seat:
    """A member that was started."""

    rank: Rank
    host: Host
    opened: OpenedAgent


class SurvivalFields(TypedDict, total=False):
    """Fields of `Place` in jobs that survive their launcher."""

    members: list[int]
    reach: list[str]
    least: int


class ElasticJob:
    """The members of one run. `open_elastic_job` makes this object, and ends all members in any case."""

    def __init__(
        self,
        limits: Limits,
        environment: Mapping[str, str],
        agents: Agents,
        members: Members,
        secret: bytes,
        events: "queue.SimpleQueue[object]",
        record: Record | None,
    ) -> None:
        self._roster, self._least = Roster(limits), limits.least
        self._environment, self._agents, self._members = environment, agents, members
        self._secret, self._events = secret, events
        self._record = record  # for the launcher that takes over when this one is lost
        self._name = secrets.token_hex(4) if record is None else record.name
        self._survivor_logs = "" if record is None else record.folder
        self._absent: dict[int, float] = {}  # members of a lost launcher, and the time at which they count as lost
        self._started: dict[int, _Seat] = {}
        # Members whose host's agent is being opened, with the place that each expects. Others may end before.
        self._unopened: list[tuple[Start, Topology]] = []
        self._end_at: dict[int, float] = {}  # members that were told to end: the time at which they are made to
        self._returned: dict[int, Back] = {}  # members of a lost launcher that have called
        self._next_ping = 0.0
        self._server: RendezvousServer | None = None
        self.formed: tuple[int, ...] = ()  # the newest generation's members, by rank
        self._outcome: Outcome | None = None

    def run(self, task: Task, on_line: OnLine) -> Failure | None:
        """Start members with `task` and follow the job to its end.

        Returns the failure that has ended it, or None. Members may still run then. Ctrl-C interrupts the wait."""
        if self._record is not None and self._record.members:
            self._take_over(self._record)
        while self._outcome is None:
            self._handle(self._next_event())
            self._ask_members()
            for action in self._roster.step(time.monotonic()):
                self._act(action)
            self._start_members(task, on_line)
            self._adopt_members(on_line)
            self._end_members()
        outcome = self._outcome
        if outcome.failure is None and outcome.problem:
            return Failure(rank=0, reason=f"the elastic job has ended: {outcome.problem}", code=1)
        if outcome.problem:
            log.error("the elastic job has ended: %s", outcome.problem)
        return outcome.failure

    def give_up(self, problem: str) -> None:
        """End the job for a reason of its site; any thread may call this."""
        self._events.put(Outcome(None, problem))

    def values(self) -> list[bytes]:
        """Return the pickled values of a successful call, by rank of the last generation."""
        return [self._started[number].rank.value() for number in self.formed]

    def stop(self, grace: timedelta = GRACE) -> None:
        """End all members, SIGTERM first, and wait until no process of them is left; a second Ctrl-C kills at once."""
        try:
            self._end(grace)
        except BaseException:
            self._end(timedelta(0))
            raise
        finally:
            if self._server is not None:
                self._server.close()
            if self._record is not None:
                self._record.remove()

    def _end(self, grace: timedelta) -> None:
        for seat in self._started.values():
            seat.rank.terminate(grace)
        for number, seat in self._started.items():
            if not seat.rank.wait_gone(grace + GONE):
                log.error("member %d survived SIGKILL; look for its processes in uninterruptible sleep", number)

    # --- events

    def _next_event(self) -> object:
        """Return the next event; None when something is to be done without one."""
        now = time.monotonic()
        times = [self._roster.next_time(), *self._end_at.values(), *self._absent.values(), now + PING_EVERY]
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=max(0.0, min(each for each in times if each is not None) - now))
        return None

    def _handle(self, event: object) -> None:
        now = time.monotonic()
        if isinstance(event, Found):
            log_hosts(event.hosts, self._roster.limits.wanted if self._roster.generation < 0 else 0)
            self._roster.find_hosts(event.hosts)
        elif isinstance(event, Opened):
            self._agents.note(event)
            if event.opened is None:
                log.warning("ranks cannot be started on %s, which rests for a while: %s", event.host, event.problem)
                self._roster.rest(event.host, now)
                for start in [start for start, _ in self._unopened if start.host.name == event.host]:
                    self._forget(start.number)
        elif isinstance(event, Came):
            if event.number not in self._roster.live:
                # Its host was given up, and is there again.
                self._members.send(event.number, Leave("its place was given to another process"))
            self._roster.come(event.number, event.commits, now)
        elif isinstance(event, _Ended):
            self._note_end(event, now)
        elif isinstance(event, Returned):
            self._returned[event.number] = event.place
        elif isinstance(event, Left):
            seat = self._started.get(event.number)
            if seat is not None and isinstance(seat.rank, Adopted):
                seat.rank.leave(event.well)
        elif isinstance(event, Outcome):
            self._outcome = event

    def _note_end(self, event: _Ended, now: float) -> None:
        self._end_at.pop(event.number, None)
        if event.failure is not None and event.number in self._roster.live and not self._roster.is_ending(event.number):
            log.warning("member %d is lost: %s", event.number, event.failure.reason)
        if event.failure is None and self._roster.is_newcomer(event.number):
            log.warning("member %d has left: its program ended before it reached the training", event.number)
        if event.failure is not None:
            self._depart(event.number)
        self._roster.lose(event.number, event.failure, now)
        if self._record is not None and event.number in self._record.members:
            del self._record.members[event.number]
            self._record.write()
        if event.failure is not None and event.failure.code == LOST_HOST and event.number in self._started:
            self._agents.drop(self._started[event.number].host.name)

    def _depart(self, number: int) -> None:
        """Tell the ranks that still meet that this one will not come."""
        if number in self.formed and self._server is not None:
            self._server.depart(self.formed.index(number), f"member {number} is lost")

    def _ask_members(self) -> None:
        """Ask all members whether they are alive; give up those that others wait for and that do not answer."""
        now = time.monotonic()
        if now < self._next_ping:
            return
        self._next_ping = now + PING_EVERY
        signs = {number: self._members.ask(number) for number in self._roster.live}
        trains = self._roster.training
        is_awaited = self._roster.is_awaited
        if not is_awaited and all(signs[number].still < STILL for number in trains):
            return
        for number, asked in [(each, signs[each].unanswered) for each in trains]:
            seat = self._started.get(number)
            agent = None if seat is None else seat.opened.agent
            if (why := why_lost(agent, number, self._secret, asked, is_awaited)) is not None:
                log.warning("member %d is lost: %s", number, why)
                self._depart(number)  # nobody else tells of its end if its host is lost
                for action in self._roster.give_up(number, why, now):
                    self._act_end(action)

    # --- actions

    def _act(self, action: object) -> None:
        if isinstance(action, Start):
            self._unopened.append((action, Topology.from_hosts(*self._roster.expected(action.number))))
        elif isinstance(action, Form):
            self._form(action)
        elif isinstance(action, Tell):
            for number in action.members:
                self._members.send(number, Hosts(action.added, action.removed))
        elif isinstance(action, End):
            self._act_end(action)
        elif isinstance(action, Outcome):
            self._outcome = action

    def _start_members(self, task: Task, on_line: OnLine) -> None:
        """Start the members whose host has an agent; the others wait until it is opened."""
        for start, place in list(self._unopened):
            if (opened := self._agents.find(start.host)) is not None:
                self._unopened.remove((start, place))
                self._start(start, place, opened, task, on_line)

    def _start(self, start: Start, place: Topology, opened: OpenedAgent, task: Task, on_line: OnLine) -> None:
        place = replace(place, local_rank=opened.agent.first_slot + start.slot)
        member = MemberEnvironment(
            number=start.number,
            launcher=self._members.listen(opened.address),
            secret=self._secret,
            survives=bool(self._survivor_logs),
            expected=place if self._roster.generation >= 0 else None,
        )
        threads = {"OMP_NUM_THREADS": str(threads_per_rank(opened.agent.usable_cores, start.host.slots))}
        foreign = OF_ONE_PROCESS.union(TORCH_PLACES)
        inherited = {name: value for name, value in self._environment.items() if name not in foreign}
        env = {"PYTHONUNBUFFERED": "1", **threads, **inherited, **note_launches(self._environment)}
        env |= {**show_place(place, place.local_rank), **member.write(), "FARANDOLE_JOB": self._name}
        env["HOROVOD_HOSTNAME"] = start.host.name
        log.info("member %d starts on %s", start.number, start.host.name)
        kept = self._survivor_logs and f"{self._survivor_logs}/{start.number}"
        if self._record is not None:
            self._record.addresses = self._members.ports
            self._record.members[start.number] = (start.host.name, start.slot)
            self._record.write()
        assignment = Assignment(rank=start.number, host=start.host, env=env, survivor_log=kept)
        started = opened.agent.start(assignment, task, on_line, self._end_of)
        self._started[start.number] = _Seat(started, start.host, opened)

    def _take_over(self, record: Record) -> None:
        """Wait for the agents of a lost launcher's hosts, and listen where it did: its members call there."""
        now = time.monotonic()
        hosts = {name: Host(name, slot + 1) for name, slot in sorted(record.members.values())}
        while None in [self._agents.find(host) for host in hosts.values()] and time.monotonic() < now + RETURN:
            self._handle(self._next_event())
        log.info("this launcher takes over job %s with members %s", record.name, ", ".join(map(str, record.members)))
        for number, (name, slot) in record.members.items():
            self._roster.expect(number, name, slot, now)
            self._absent[number] = time.monotonic() + RETURN
        for address, port in record.addresses.items():
            self._members.listen(address, port)

    def _adopt_members(self, on_line: OnLine) -> None:
        """Take over the members that have called; those that do not call in time are lost."""
        now = time.monotonic()
        returned, self._returned = self._returned, {}
        for number, back in returned.items():
            place = None if self._record is None else self._record.members.get(number)
            opened = place and self._agents.find(Host(place[0], place[1] + 1))
            if place is None or not opened:
                self._members.send(number, Leave("its place was given to another process"))
                continue
            self._roster.adopt(number, *place, back.rank, back.generation, now)
            if self._absent.pop(number, None) is not None:
                log.info("member %d (process %d) has called", number, back.pid)
                leave = functools.partial(self._members.send, number, Leave("the job has ended"))
                pid = back.pid if is_local(place[0]) else None
                rank = Adopted(number, pid, f"{self._survivor_logs}/{number}", on_line, self._end_of, leave)
                self._started[number] = _Seat(rank, Host(place[0], place[1] + 1), opened)
        for number, at in list(self._absent.items()):
            agent = self._agent_of(number)
            code = None if agent is None else agent.noted_end(f"{self._survivor_logs}/{number}")
            if code is not None or at <= now:
                del self._absent[number]
                if code is None and agent is not None:
                    agent.end_member(number, self._secret)  # it may be stopped
                self._note_end(_Ended(number, end_without_launcher(number, code)), now)

    def _agent_of(self, number: int) -> Agent | None:
        """Return the agent of the host of a lost launcher's member; None without one."""
        place = None if self._record is None else self._record.members.get(number)
        opened = None if place is None else self._agents.opened(place[0])
        return opened.agent if opened else None

    def _end_of(self, number: int, failure: Failure | None) -> None:
        self._events.put(_Ended(number, failure))

    def _form(self, form: Form) -> None:
        """Give the members of a generation their places, and a rendezvous of their own."""
        if self._server is not None:
            self._server.close()
        seats = [self._started[number] for number in form.members]
        # Members on hosts that reach this machine at different addresses meet at one server with all of them. Members
        # of this machine take one of these addresses, too: others reach them where they reach the server.
        far = [seat.opened.address for seat in seats if not ip_address(seat.opened.address).is_loopback]
        addresses = list(dict.fromkeys(far)) or [seats[0].opened.address]
        secret, others, number = new_secret(), addresses[1:], form.generation
        self._server = RendezvousServer(len(seats), secret, host=addresses[0], others=others, generation=number)
        at = dict(zip(addresses, self._server.addresses, strict=True))
        hosts = [seat.opened.agent.identity for seat in seats]
        self.formed = form.members
        log.info("generation %d: members %s", form.generation, ", ".join(map(str, form.members)))
        for rank, (number, seat, slot) in enumerate(zip(form.members, seats, form.slots, strict=True)):
            place = Place(
                rank=rank,
                local_rank=seat.opened.agent.first_slot + slot,
                generation=form.generation,
                most=self._roster.limits.most,
                hosts=hosts,
                address=at.get(seat.opened.address, self._server.addresses[0]),
                secret=secret,
                **self._survival(form.members, seat),
            )
            self._members.send(number, place)

    def _survival(self, members: Sequence[int], seat: _Seat) -> SurvivalFields:
        """Return what the member of `seat` needs to find the others when this launcher is lost."""
        if not self._survivor_logs:
            return {}
        reach = [seat.opened.find(self._started[each].opened, self._members.addresses(each)) for each in members]
        return {"members": list(members), "reach": reach, "least": self._least}

    def _act_end(self, action: End) -> None:
        log.info("member %d is ended: %s", action.number, action.why)
        seat = self._started.get(action.number)
        if seat is None:
            self._forget(action.number)
        elif action.at_once:
            seat.rank.terminate(timedelta(0))
        elif self._members.send(action.number, Leave(action.why)):
            self._end_at[action.number] = time.monotonic() + LEAVE
        else:
            seat.rank.terminate(GRACE)

    def _forget(self, number: int) -> None:
        """Forget a member that was never started."""
        self._unopened = [each for each in self._unopened if each[0].number != number]
        self._roster.forget(number)

    def _end_members(self) -> None:
        """End members that were told to end and have not."""
        now = time.monotonic()
        for number in [number for number, at in self._end_at.items() if at <= now]:
            del self._end_at[number]
            self._started[number].rank.terminate(GRACE)


@contextlib.contextmanager
def open_elastic_job(
    limits: Limits,
    discovery: HostDiscovery,
    backend_of: Callable[[Host], Backend],
    environment: Mapping[str, str],
    record: Record | None = None,
) -> Iterator[ElasticJob]:
    """Prepare a job on the hosts of `discovery`, each reached by its backend. When the context ends, so do all members
    and their descendants. With a `record` they go on if this process is killed; members in it are taken over."""
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    secret = new_secret() if record is None else record.secret
    with contextlib.ExitStack() as stack:
        members = Members(secret, events)
        stack.callback(members.close)
        agents = Agents(backend_of, events)
        stack.callback(agents.close)
        watch = Watch(discovery, events)
        stack.callback(watch.close)
        job = ElasticJob(limits, environment, agents, members, secret, events, record)
        stack.callback(job.stop)
        yield job
