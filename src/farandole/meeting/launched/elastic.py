"""Places of this process among the ranks of an elastic job, one generation after another.

The job's launcher starts members: processes with a number for life. A member holds one connection to the launcher. It
asks for a place there, and gets a rank, a generation and the address of that generation's rendezvous. While it trains,
the launcher tells it when hosts have come or go, and asks now and then whether it is alive."""

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Self

from farandole.config import Config
from farandole.errors import ConfigError, RendezvousError
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, send
from farandole.meeting.launched.elastic_messages import (
    FROM_LAUNCHER,
    LARGEST,
    Back,
    Bye,
    Hosts,
    Leave,
    Ping,
    Place,
    Pong,
    Ready,
)
from farandole.meeting.launched.election import Election, LauncherIsBack, has_ended
from farandole.meeting.launched.stuck import StuckMembers
from farandole.meeting.rendezvous import TcpRendezvous
from farandole.topology import Topology

SILENCE = 60.0  # seconds without a message from the launcher, which sends one each second, after which it is lost
LOST = 2.0  # seconds for the port of a launcher that was killed to be closed
AGAIN = 0.25  # seconds between two calls for a launcher that takes over


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnvironment:
    """The environment variables of a member of an elastic job."""

    number: int
    launcher: str  # "host:port"
    secret: bytes = field(repr=False)
    survives: bool = False  # its launcher, with the members that are left
    expected: Topology | None = None  # the place of a newcomer, if no other rank comes or goes until it asks for one

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> Self | None:
        """Read the variables from `env` (default: `os.environ`); None if this process is no member."""
        env = os.environ if env is None else env
        if not env.get("FARANDOLE_MEMBER"):
            return None
        try:
            secret = bytes.fromhex(env["FARANDOLE_MEMBER_SECRET"])
            expected = None
            if env.get("FARANDOLE_MEMBER_EXPECTS"):
                rank, local_rank, hosts = json.loads(env["FARANDOLE_MEMBER_EXPECTS"])
                expected = replace(Topology.from_hosts(rank, hosts), local_rank=local_rank)
            return cls(
                number=int(env["FARANDOLE_MEMBER"]),
                launcher=env["FARANDOLE_MEMBER_LAUNCHER"],
                secret=secret,
                survives=env.get("FARANDOLE_SURVIVES") == "1",
                expected=expected,
            )
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError("FARANDOLE_MEMBER", f"is set, but not as a launcher sets it ({error})") from error

    def write(self) -> dict[str, str]:
        """Return the variables for the member's process; HOROVOD_ELASTIC is for programs written for Horovod."""
        place = self.expected
        told = "" if place is None else json.dumps([place.rank, place.local_rank, place.hosts])
        return {
            "FARANDOLE_MEMBER": str(self.number),
            "FARANDOLE_MEMBER_EXPECTS": told,
            "FARANDOLE_MEMBER_LAUNCHER": self.launcher,
            "FARANDOLE_MEMBER_SECRET": self.secret.hex(),
            "FARANDOLE_SURVIVES": "1" if self.survives else "0",
            "HOROVOD_ELASTIC": "1",
        }


def is_launcher_lost(address: str) -> bool:
    """Return whether the launcher that listened at `address` has ended: its host refuses connections. Blocks up to 4 s.

    A launcher whose host does not answer may still form generations."""
    end = time.monotonic() + LOST
    while not has_ended(address):
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


class _Channel:
    """This member's connection to the launcher. A thread reads it, and answers the launcher's questions at once."""

    def __init__(self, member: MemberEnvironment, config: Config) -> None:
        self._member, me = member, f"member {member.number}".encode()
        self._patience = config.elastic_timeout
        self._dial = functools.partial(dial, member.launcher, member.secret, me=me)
        try:
            self._sock, _ = self._dial(deadline=Deadline(config.start_timeout))
        except OSError as error:
            text = f"member {member.number} could not reach the launcher of its elastic job: {error}"
            raise RendezvousError(text, where=member.launcher) from error
        self._sock.settimeout(SILENCE)
        self._where = member.launcher
        self._changed = threading.Condition()
        self._answers: list[Place | Leave] = []  # at most one
        self._lost = ""
        self._asked: Ready | None = None  # what is not answered yet
        self._closing = threading.Event()
        self._election = Election(member.number, member.secret) if member.survives else None
        self.changes = Hosts()
        self.stats: Callable[[], Mapping[str, int]] = dict
        self._thread = threading.Thread(target=self._listen, name="farandole-elastic", daemon=True)
        self._thread.start()

    def ask(self, commits: int) -> Place | Leave:
        """Ask for a place, and return the launcher's answer. Blocks as long as the launcher is there.

        When it is lost and the job survives that, the members that are left form a generation by themselves."""
        election = self._election
        with self._changed:
            self._answers.clear()
            self.changes = Hosts()
            self._asked = Ready(commits, [] if election is None else election.addresses)
            self._send(self._asked)
        while (answer := self._wait_for_launcher() or self._elect(commits)) is None:
            pass  # a launcher has taken over meanwhile
        self._asked = None
        if election is not None and isinstance(answer, Place):
            election.take(answer)
        return answer

    def _wait_for_launcher(self) -> Place | Leave | None:
        """Return the launcher's answer; None once it is lost."""
        with self._changed:
            while not (self._answers or self._lost):
                self._changed.wait(1.0)  # with a limit, so that Ctrl-C is noticed
            return self._answers.pop() if self._answers else None

    def _elect(self, commits: int) -> Place | None:
        """Return the place that the members that are left give this one; None if a launcher has taken over."""
        election, why = self._election, self._lost
        if election is not None and election.is_possible:
            if is_launcher_lost(self._where):
                with contextlib.suppress(LauncherIsBack):
                    place = election.elect(commits, self._patience, lambda: not self._lost)
                    election.take(place)
                    self._report()  # a launcher that has just come back thinks that this member still waits
                    return place
            with self._changed:
                if self._changed.wait_for(lambda: not self._lost, 8 * AGAIN + LOST):
                    return None
        raise RendezvousError(f"the launcher of this elastic job is lost ({why})", where=self._where)

    def close(self) -> None:
        """End the connection and the thread; idempotent."""
        self._closing.set()
        self._send(Bye(well=getattr(sys, "last_value", None) is None))
        with contextlib.suppress(OSError):  # the launcher has ended it already
            self._sock.shutdown(2)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()
        if self._election is not None:
            self._election.close()

    def _send(self, message: Ready | Pong | Back | Bye) -> None:
        with contextlib.suppress(OSError), self._changed:  # the reading thread notices that the launcher is gone
            send(self._sock, message)

    def _listen(self) -> None:
        self._read()
        while self._election is not None and self._election.is_possible and self._call_again():
            self._read()

    def _call_again(self) -> bool:
        """Wait for a launcher that takes over at the address of the lost one; False when this member leaves.

        Meanwhile ask whether the other members are alive, as a launcher does."""
        election, stuck = self._election, StuckMembers(self._member.number, self._member.secret)
        if election is not None and not self._closing.is_set():
            election.answer()
        while not self._closing.wait(AGAIN):
            if election is not None:
                stuck.end(election.others, self.stats().get("operations", 0))
            with contextlib.suppress(OSError, RendezvousError):  # nobody listens there yet, or somebody else
                sock, _ = self._dial(deadline=Deadline(timedelta(seconds=LOST)))
                sock.settimeout(SILENCE)
                with self._changed:  # so that `ask` asks either the old one or this one
                    self._sock.close()
                    self._sock, self._lost = sock, ""
                    self._report()
                    if self._asked is not None:
                        self._send(self._asked)
                    self._changed.notify_all()
                return True
        return False

    def _report(self) -> None:
        """Tell a launcher that has taken over about this member."""
        if self._election is not None:
            self._send(Back(*self._election.place, os.getpid()))

    def _read(self) -> None:
        try:
            while True:
                message = FROM_LAUNCHER.receive(self._sock, limit=LARGEST)
                if isinstance(message, Ping):
                    self._send(Pong(self.stats().get("operations", 0)))
                    continue
                with self._changed:
                    if isinstance(message, Hosts):
                        before = self.changes
                        self.changes = Hosts(before.added or message.added, before.removed or message.removed)
                    else:
                        self._answers = [message]
                    self._changed.notify_all()
        except (OSError, EOFError, RendezvousError, ValueError) as error:
            with self._changed:
                self._lost = str(error) or type(error).__name__
                self._changed.notify_all()


class ElasticRendezvous(TcpRendezvous):
    """Rendezvous of one generation of an elastic job, whose launcher has given this process a rank."""

    _patient = False  # the server was there before this place was given: it is lost if it refuses connections

    def __init__(self, channel: _Channel, place: Place) -> None:
        super().__init__(place.address, place.rank, len(place.hosts), place.secret, place.generation)
        self.local_rank, self.most = place.local_rank, place.most
        self._channel = channel
        self._keeps = False

    @property
    def changes(self) -> Hosts:
        """The changes of the job's hosts since this place was given."""
        return self._channel.changes

    def follow(self, stats: Callable[[], Mapping[str, int]]) -> None:
        """Tell the launcher how many "operations" this rank has finished, by a function for any thread.

        While the number stays the same, the launcher gives up ranks of the generation that do not answer."""
        self._channel.stats = stats

    def keep_launcher(self, keep: bool = True) -> None:
        """Keep the connection to the launcher when this generation ends, for `next`; by default it is closed."""
        self._keeps = keep

    def next(self, commits: int) -> "ElasticRendezvous":
        """Ask for a place in the next generation, for a state of `commits` commits; -1: this member has none.

        Blocks until the launcher forms it. Raises `SystemExit` if the training has ended, or has no place for this
        process any more, and `RendezvousError` if the launcher is lost."""
        self._channel.stats = dict
        return _take_place(self._channel, commits)

    def close(self) -> None:
        """End this rank's part in the generation."""
        super().close()
        if not self._keeps:
            self._channel.close()


def meet_in_elastic_job(member: MemberEnvironment, config: Config) -> ElasticRendezvous:
    """Connect to the launcher and wait for this member's first place; see `ElasticRendezvous.next`."""
    channel = _Channel(member, config)
    try:
        return _take_place(channel, commits=-1)
    except BaseException:
        channel.close()
        raise


def _take_place(channel: _Channel, commits: int) -> ElasticRendezvous:
    answer = channel.ask(commits)
    if isinstance(answer, Leave):
        raise SystemExit(0)
    os.environ.update(show_place(Topology.from_hosts(answer.rank, answer.hosts), answer.local_rank))
    return ElasticRendezvous(channel, answer)


def show_place(place: Topology, local_rank: int) -> dict[str, str]:
    """Return the variables of Horovod that programs read to find their place."""
    numbers = {name: getattr(place, name) for name in ("rank", "size", "local_size", "cross_rank", "cross_size")}
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in {**numbers, "local_rank": local_rank}.items()}
