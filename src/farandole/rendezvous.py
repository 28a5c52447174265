"""How ranks find each other: an all-gather of small byte strings, and nothing else.

`TcpRendezvous` meets at the launcher's `RendezvousServer`, `ThreadRendezvous` within one process, `SoloRendezvous`
alone, `PartRendezvous` some of the ranks that have met already; engines with an all-gather of their own (Spark, MPI)
implement `Rendezvous` where they are met."""

import contextlib
import hashlib
import hmac
import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, Self, TypeVar, cast, runtime_checkable

from farandole.dialer import dial
from farandole.errors import FarandoleError, RendezvousError
from farandole.handshake import Deadline, new_secret, recv_frame, split_address
from farandole.meeting import Answer, Caller, Meeting, read_answer
from farandole.other_launchers import refuse_other_launch
from farandole.rendezvous_server import GOODBYE, MAX_PAYLOAD, REQUEST, RendezvousServer, answer_limit
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

# The server answers when the time is over; a caller waits this much longer for it to say who is missing.
GRACE = timedelta(seconds=5)


@runtime_checkable
class Rendezvous(Protocol):
    """Where the ranks of one generation meet."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def address(self) -> str | None:
        """The "host:port" at which all ranks reach it, None where they are all on one host."""
        ...

    @property
    def secret(self) -> bytes:
        """What only members of this job know; peers prove it to each other before they talk."""
        ...

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all ranks and return everybody's in rank order.

        Blocks until every rank has called, up to `timeout`; raises `RendezvousError` naming who did not."""
        ...

    def close(self) -> None:
        """End this rank's part; others who wait for it hear so."""
        ...


class SoloRendezvous:
    """The rendezvous of a job of one rank."""

    rank = 0
    size = 1
    address = None

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.secret = new_secret()

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Return `payload` alone; never blocks."""
        return [payload]

    def close(self) -> None:
        """Nothing is held."""


class TcpRendezvous:
    """Meets the other ranks at the `RendezvousServer` at `address`; each all-gather is a connection of its own.

    Making one connects to nothing, so that a rank may start before the server does."""

    def __init__(self, address: str, rank: int, size: int, secret: bytes, generation: int = 0) -> None:
        self.address, self.rank, self.size, self.generation = address, rank, size, generation
        split_address(address)  # a wrong one is refused here
        self.secret = secret
        self._round = 0
        self._closed = threading.Event()

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload`, at most 1 MiB, to all ranks and return everybody's in rank order.

        Blocks until every rank has called, up to `timeout`, and keeps trying that long when the server is not there
        yet. Raises `RendezvousError` naming who did not come, `AuthenticationError` when the secrets differ."""
        answer, sock = self._call(payload, timeout, stay=False)
        sock.close()
        return answer

    def allgather_and_watch(
        self, payload: bytes, on_loss: Callable[[RendezvousError], None], *, timeout: timedelta
    ) -> "tuple[list[bytes], Lifeline]":
        """Do as `allgather` does, and have `on_loss` called when a rank dies before it has closed its lifeline."""
        answer, sock = self._call(payload, timeout, stay=True)
        return answer, Lifeline(sock, self.address, on_loss)

    def close(self) -> None:
        """Let an `allgather` that still looks for the server, in another thread, give up."""
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
        """Connect and authenticate; a server that is not up yet is tried again until `deadline`."""
        me = Caller(rank=self.rank, size=self.size, generation=self.generation, round=self._round).pack()
        try:
            sock, _ = dial(self.address, self.secret, me=me, deadline=deadline, patient=True, wait=self._pause)
        except TimeoutError as error:
            text = f"rank {self.rank} could not reach the rendezvous: {error}"
            raise RendezvousError(text, where=self.address) from error
        return sock

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise RendezvousError("the rendezvous was closed", where=self.address)

    def _ask(self, sock: socket.socket, payload: bytes, deadline: Deadline, stay: bool) -> Answer:
        try:
            left = deadline.remaining()
            sock.settimeout(left)
            sock.sendall(REQUEST.pack(left, len(payload), stay) + payload)
            answer = recv_frame(sock, answer_limit(self.size), deadline=Deadline(timedelta(seconds=left) + GRACE))
        except (OSError, EOFError) as error:
            raise RendezvousError(f"the rendezvous broke off ({error})", where=self.address) from error
        return read_answer(answer, self.address)


class Lifeline:
    """A rank's connection to the rendezvous while it connects to its peers: its end is the rank's death.

    `on_loss` hears, on a thread of the lifeline, of each other rank that died. The end of the rendezvous itself means
    nothing: the ranks need it no more."""

    def __init__(self, sock: socket.socket, where: str, on_loss: Callable[[RendezvousError], None]) -> None:
        self._sock, self._where, self._on_loss = sock, where, on_loss
        sock.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="farandole-lifeline", daemon=True)
        self._thread.start()

    def close(self, *, failed: bool = False) -> None:
        """End the connection and the thread; the other ranks take it for this rank's death if it has `failed`."""
        with contextlib.suppress(OSError):  # the rendezvous is gone already
            if not failed:
                self._sock.send(GOODBYE)
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError, FarandoleError):  # it was closed, here or there
            while True:
                answer = read_answer(recv_frame(self._sock, MAX_PAYLOAD), self._where)
                assert isinstance(answer, RendezvousError)
                self._on_loss(answer)


class ThreadRendezvous:
    """Meets the other ranks of this process, each of which is a thread."""

    address = None

    def __init__(self, rank: int, hall: "_Hall") -> None:
        self.rank, self.size, self.generation = rank, hall.meeting.size, 0
        self.secret = hall.secret
        self._hall = hall
        self._round = 0

    @classmethod
    def group(cls, size: int) -> list[Self]:
        """Make one rendezvous for each of `size` ranks."""
        hall = _Hall(size)
        return [cls(rank, hall) for rank in range(size)]

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all ranks and return everybody's in rank order.

        Blocks until every rank has called, up to `timeout`; raises `RendezvousError` naming who did not come or
        has closed its rendezvous."""
        caller = Caller(rank=self.rank, size=self.size, generation=self.generation, round=self._round)
        answer = self._hall.wait(caller, payload, timeout)
        # The threads share one answer; each gets its own list, and its own error, which collects its own traceback.
        if isinstance(answer, RendezvousError):
            raise RendezvousError(*answer.args)
        self._round += 1
        return list(answer)

    def shared(self, key: str, make: Callable[[], T], generation: int = 0) -> T:
        """Return the one object that ranks of this group share under `key`; the first to ask makes it."""
        with self._hall.making:
            if (generation, key) not in self._hall.shared:
                self._hall.shared[generation, key] = make()
            return cast(T, self._hall.shared[generation, key])

    def forget(self, generation: int) -> None:
        """Let go of what ranks share in `generation`: all who ask for it have done so."""
        with self._hall.making:
            for held in [held for held in self._hall.shared if held[0] == generation]:
                del self._hall.shared[held]

    def close(self) -> None:
        """This rank will not come again: whoever waits for it, now or later, hears so at once."""
        self._hall.depart(self.rank)


class PartRendezvous:
    """Where some ranks of a job that runs already, the `members`, meet to connect among themselves.

    `gather` exchanges their payloads, by way of all ranks. Each `generation` has a secret of its own, so that a
    connection meant for one can never be taken for one of another."""

    def __init__(
        self, whole: Rendezvous, members: Sequence[int], generation: int, gather: Callable[[bytes], list[bytes]]
    ) -> None:
        self.whole, self.generation, self.address = whole, generation, whole.address
        self.rank, self.size = members.index(whole.rank), len(members)
        label = f"part {generation} of generation {whole.generation}".encode()
        self.secret = hmac.new(whole.secret, label, hashlib.sha256).digest()
        self._gather = gather

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all members and return everybody's in order; `gather` has limits of its own."""
        return self._gather(payload)

    def close(self) -> None:
        """All members have connected, or will not: nothing that they share on the way is needed any more."""
        if isinstance(self.whole, ThreadRendezvous):
            self.whole.forget(self.generation)


class _Hall:
    """What the threads of a group have in common."""

    def __init__(self, size: int) -> None:
        self.meeting = Meeting(size)
        self.secret = new_secret()
        self.making = threading.Lock()
        self.shared: dict[tuple[int, str], object] = {}
        self._changed = threading.Condition()
        self._answers: dict[int, Answer] = {}
        self._tickets = itertools.count()

    def wait(self, caller: Caller, payload: bytes, timeout: timedelta) -> Answer:
        with self._changed:
            now, ticket = time.monotonic(), next(self._tickets)
            deadline = now + timeout.total_seconds()
            self._tell(self.meeting.arrive(ticket, caller, payload, now=now, deadline=deadline))
            try:
                while ticket not in self._answers:
                    self._changed.wait(deadline - time.monotonic())
                    self._tell(self.meeting.expire(time.monotonic()))
            except BaseException:
                self._tell(self.meeting.leave(ticket))
                raise
            return self._answers.pop(ticket)

    def depart(self, rank: int) -> None:
        with self._changed:
            self._tell(self.meeting.depart(rank, f"rank {rank} has closed its rendezvous"))

    def _tell(self, answers: dict[int, Answer]) -> None:
        if answers:
            self._answers.update(answers)
            self._changed.notify_all()


def from_environment(env: Mapping[str, str] | None = None) -> Rendezvous:
    """Make the rendezvous that a launcher's variables name; without a launcher this process is the only rank.

    Raises `ConfigError` when another launcher's variables tell of several processes, which cannot meet here."""
    job = JobEnvironment.read(env)
    if job is None:
        refuse_other_launch(env)
        return SoloRendezvous()
    refuse_other_launch(env, rank=job.rank, size=job.size)
    return TcpRendezvous(job.rendezvous, job.rank, job.size, job.secret, job.generation)
