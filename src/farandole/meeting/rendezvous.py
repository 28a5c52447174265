"""Rendezvous of the ranks of a job: an all-gather of small byte strings.

`TcpRendezvous` is for ranks that reach a `RendezvousServer`, `ThreadRendezvous` for threads of one process,
`SoloRendezvous` for one rank, `PartRendezvous` for some ranks of a running job. Packages with an all-gather of their
own (torch.distributed) derive from `Rendezvous` themselves."""

import contextlib
import hashlib
import hmac
import itertools
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Self, TypeVar, cast

from farandole.errors import FarandoleError, RendezvousError
from farandole.meeting.addresses import split_address
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, encode, recv_frame, send
from farandole.meeting.handshake import new_secret
from farandole.meeting.rounds import Caller, Meeting, RoundResult, decode_result
from farandole.meeting.server import GOODBYE, MAX_PAYLOAD, RendezvousServer, Request, result_limit
from farandole.other_launchers import OtherLaunch, refuse_other_launch
from farandole.topology import JobEnvironment

__all__ = [
    "Lifeline",
    "PartRendezvous",
    "Rendezvous",
    "RendezvousServer",
    "SoloRendezvous",
    "TcpRendezvous",
    "ThreadRendezvous",
    "from_environment",
]

T = TypeVar("T")

# The server answers at the deadline; a caller waits this much longer for the names of the missing ranks.
GRACE = timedelta(seconds=5)


class Rendezvous(ABC):
    """Meeting place of the ranks of one generation, whose peers prove to each other that they know `secret`."""

    rank: int
    size: int
    generation: int = 0
    local_rank: int | None = None  # given by the launcher; None: the ranks of a host are counted in rank order
    address: str | None = None  # "host:port" at which all ranks reach it; None if they are all on one host
    secret: bytes
    launch: OtherLaunch | None = None  # by whose means the ranks have met before they served this rendezvous

    @property
    def whole(self) -> "Rendezvous":
        """The rendezvous of all ranks of the job."""
        return self

    @abstractmethod
    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all ranks and return all payloads in rank order.

        Blocks until every rank has called, up to `timeout`; raises `RendezvousError` naming the missing ranks."""

    def allgather_and_watch(
        self, payload: bytes, on_loss: Callable[[RendezvousError], None], *, timeout: timedelta
    ) -> "tuple[list[bytes], Lifeline | None]":
        """Do as `allgather` does, and call `on_loss` when a rank dies before it has closed its lifeline.

        Without a lifeline deaths are not reported."""
        return self.allgather(payload, timeout=timeout), None

    def shared(self, key: str, make: Callable[[], T], generation: int = 0) -> T | None:
        """Return the object that ranks which are threads of one process share under `key`; None for other ranks.

        The first caller makes it."""
        return None

    def forget(self, generation: int) -> None:
        """Drop the objects shared in `generation`, after all ranks have fetched them."""
        return None

    def close(self) -> None:
        """End this rank's participation; ranks that wait for it get an error."""
        return None


class SoloRendezvous(Rendezvous):
    """The rendezvous of a job of one rank."""

    rank = 0
    size = 1

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.secret = new_secret()

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Return `payload` alone; never blocks."""
        return [payload]


class TcpRendezvous(Rendezvous):
    """Rendezvous at the `RendezvousServer` at `address`; each all-gather has its own connection.

    The constructor does not connect, so a rank may start before the server."""

    address: str
    _patient = True

    def __init__(self, address: str, rank: int, size: int, secret: bytes, generation: int = 0) -> None:
        self.address, self.rank, self.size, self.generation = address, rank, size, generation
        split_address(address)  # refuse an invalid address here
        self.secret = secret
        self._round = 0
        self._closed = threading.Event()

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload`, at most 1 MiB, to all ranks and return all payloads in rank order.

        Blocks until every rank has called, up to `timeout`, and retries that long if the server is not there yet.
        Raises `RendezvousError` naming the missing ranks, `AuthenticationError` if the secrets differ."""
        answer, sock = self._call(payload, timeout, stay=False)
        sock.close()
        return answer

    def allgather_and_watch(
        self, payload: bytes, on_loss: Callable[[RendezvousError], None], *, timeout: timedelta
    ) -> "tuple[list[bytes], Lifeline]":
        """Do as `allgather` does, and call `on_loss` when a rank dies before it has closed its lifeline."""
        answer, sock = self._call(payload, timeout, stay=True)
        return answer, Lifeline(sock, self.address, on_loss)

    def close(self) -> None:
        """Let an `allgather` in another thread fail if it still tries to reach the server."""
        self._closed.set()

    def _call(self, payload: bytes, timeout: timedelta, *, stay: bool) -> tuple[list[bytes], socket.socket]:
        if len(payload) > MAX_PAYLOAD:
            raise RendezvousError(f"a payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}")
        deadline = Deadline(timeout)
        sock = self._connect(deadline)
        try:
            answer = self._ask(sock, payload, deadline, stay)
            if isinstance(answer, RendezvousError):
                raise answer
        except BaseException:
            sock.close()
            raise
        self._round += 1
        return answer, sock

    def _connect(self, deadline: Deadline) -> socket.socket:
        """Connect and authenticate; retry until `deadline` if the server is not there yet."""
        me = encode(Caller(rank=self.rank, size=self.size, generation=self.generation, round=self._round))
        try:
            sock, _ = dial(self.address, self.secret, me=me, deadline=deadline, patient=self._patient, wait=self._pause)
        except OSError as error:
            text = f"rank {self.rank} could not reach the rendezvous: {error}"
            raise RendezvousError(text, where=self.address) from error
        return sock

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise RendezvousError("the rendezvous was closed", where=self.address)

    def _ask(self, sock: socket.socket, payload: bytes, deadline: Deadline, stay: bool) -> RoundResult:
        limit = result_limit(self.size)
        try:
            left = deadline.remaining()
            send(sock, Request(left, stay, payload), deadline=deadline)
            answer = recv_frame(sock, limit, deadline=Deadline(timedelta(seconds=left) + GRACE))
        except (OSError, EOFError) as error:
            raise RendezvousError(f"the rendezvous broke off ({error})", where=self.address) from error
        return decode_result(answer, self.address, limit)


class Lifeline:
    """A rank's connection to the rendezvous while it connects to its peers; its loss reports the rank's death.

    `on_loss` is called for each other rank that died, on the lifeline's thread. The end of the rendezvous itself is
    ignored, because the ranks no longer need it."""

    def __init__(self, sock: socket.socket, where: str, on_loss: Callable[[RendezvousError], None]) -> None:
        self._sock, self._where, self._on_loss = sock, where, on_loss
        sock.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="farandole-lifeline", daemon=True)
        self._thread.start()

    def close(self, *, failed: bool = False) -> None:
        """End the connection and the thread; with `failed`, the other ranks are sent a report of this rank's death."""
        with contextlib.suppress(OSError):  # the rendezvous is closed already
            if not failed:
                self._sock.send(GOODBYE)
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError, FarandoleError):  # closed by either end
            while True:
                answer = decode_result(recv_frame(self._sock, MAX_PAYLOAD), self._where, MAX_PAYLOAD)
                assert isinstance(answer, RendezvousError)
                self._on_loss(answer)


class ThreadRendezvous(Rendezvous):
    """Rendezvous of ranks that are threads of this process."""

    def __init__(self, rank: int, state: "_SharedState") -> None:
        self.rank, self.size = rank, state.meeting.size
        self.secret = state.secret
        self._state = state
        self._round = 0

    @classmethod
    def group(cls, size: int) -> list[Self]:
        """Make one rendezvous for each of `size` ranks."""
        state = _SharedState(size)
        return [cls(rank, state) for rank in range(size)]

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all ranks and return all payloads in rank order.

        Blocks until every rank has called, up to `timeout`; raises `RendezvousError` naming the ranks that are missing
        or have closed their rendezvous."""
        caller = Caller(rank=self.rank, size=self.size, generation=self.generation, round=self._round)
        answer = self._state.wait(caller, payload, timeout)
        # The threads share one answer; each gets its own list, or its own error with its own traceback.
        if isinstance(answer, RendezvousError):
            raise RendezvousError(*answer.args)
        self._round += 1
        return list(answer)

    def shared(self, key: str, make: Callable[[], T], generation: int = 0) -> T:
        """Return the object that ranks of this group share under `key`; the first caller makes it."""
        with self._state.making:
            if (generation, key) not in self._state.shared:
                self._state.shared[generation, key] = make()
            return cast(T, self._state.shared[generation, key])

    def forget(self, generation: int) -> None:
        """Drop the objects shared in `generation`, after all ranks have fetched them."""
        with self._state.making:
            for held in [held for held in self._state.shared if held[0] == generation]:
                del self._state.shared[held]

    def close(self) -> None:
        """Note that this rank will not call again: ranks that wait for it, now or later, get an error at once."""
        self._state.depart(self.rank)


class PartRendezvous(Rendezvous):
    """Rendezvous of some ranks of a running job, the `members`, that connect to each other.

    `gather` exchanges their payloads through all ranks. Each `generation` has its own secret, so that a connection of
    one generation cannot be mistaken for one of another."""

    def __init__(
        self, whole: Rendezvous, members: Sequence[int], generation: int, gather: Callable[[bytes], list[bytes]]
    ) -> None:
        self._whole, self.generation, self.address = whole, generation, whole.address
        self.rank, self.size = members.index(whole.rank), len(members)
        label = f"part {generation} of generation {whole.generation}".encode()
        self.secret = hmac.new(whole.secret, label, hashlib.sha256).digest()
        self._gather = gather

    @property
    def whole(self) -> Rendezvous:
        return self._whole

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all members and return all payloads in order; `gather` has its own time limit."""
        return self._gather(payload)

    def close(self) -> None:
        """Drop the objects that members shared while they connected."""
        self.whole.forget(self.generation)


class _SharedState:
    """Shared state of the threads of a group."""

    def __init__(self, size: int) -> None:
        self.meeting = Meeting(size)
        self.secret = new_secret()
        self.making = threading.Lock()
        self.shared: dict[tuple[int, str], object] = {}
        self._changed = threading.Condition()
        self._answers: dict[int, RoundResult] = {}
        self._tickets = itertools.count()

    def wait(self, caller: Caller, payload: bytes, timeout: timedelta) -> RoundResult:
        with self._changed:
            now, ticket = time.monotonic(), next(self._tickets)
            deadline = now + timeout.total_seconds()
            self._answer(self.meeting.arrive(ticket, caller, payload, now=now, deadline=deadline))
            try:
                while ticket not in self._answers:
                    self._changed.wait(deadline - time.monotonic())
                    self._answer(self.meeting.expire(time.monotonic()))
            except BaseException:
                self._answer(self.meeting.leave(ticket))
                raise
            return self._answers.pop(ticket)

    def depart(self, rank: int) -> None:
        with self._changed:
            self._answer(self.meeting.depart(rank, f"rank {rank} has closed its rendezvous"))

    def _answer(self, answers: dict[int, RoundResult]) -> None:
        if answers:
            self._answers.update(answers)
            self._changed.notify_all()


def from_environment(env: Mapping[str, str] | None = None) -> Rendezvous:
    """Make the rendezvous named by a launcher's variables; without a launcher this process is the only rank.

    Raises `ConfigError` if another launcher's variables announce several processes, which cannot meet here."""
    job = JobEnvironment.read(env)
    if job is None:
        refuse_other_launch(env)
        return SoloRendezvous()
    refuse_other_launch(env, rank=job.rank, size=job.size)
    return TcpRendezvous(job.rendezvous, job.rank, job.size, job.secret, job.generation)
