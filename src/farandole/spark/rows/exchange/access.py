"""Connections of tasks to keepers of dealt rows: on this host, where a task starts the keeper, and on other hosts."""

import hmac
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import BinaryIO, Literal, Self, TypeVar

from farandole.closing import Closing
from farandole.errors import CacheError, RendezvousError, SourceError
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, Kinds, send

A_FILE = b"f"  # the byte with which a descriptor is sent
KEEPER = b"keeper"  # the start of a keeper's identity
HANDSHAKE_TIMEOUT = timedelta(seconds=10)
START_TIMEOUT = timedelta(seconds=60)
STALLED = timedelta(seconds=60)  # the longest wait for the next bytes of a request or an answer
READ_PIECE = 1 << 20  # bytes

A = TypeVar("A")


def local_name(secret: bytes) -> str:
    """Return the name of the keeper's socket on its own host, in Linux's abstract name space, which has no files.

    The name derives from `secret`, so that only members of the job can know it."""
    return f"\0farandole-{hmac.digest(secret, b'the name of the keeper', 'sha256').hex()[:32]}"


class RowsLost(SourceError):
    """Dealt rows are lost because their keeper has ended; dealing them again would restore them."""


def keeper_identity(host: str) -> bytes:
    """Return the identity with which the keeper of `host` connects to the driver."""
    return KEEPER + b" " + host.encode()[:128]


def keeper_of(identity: bytes) -> str | None:
    """Return the host of the keeper that has this identity; None for a peer that is not a keeper."""
    role, _, host = identity.partition(b" ")
    return host.decode(errors="replace") if role == KEEPER else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlan:
    """Addresses and secret by which the tasks of a job reach their keepers."""

    secret: bytes = field(repr=False)
    driver: str  # host:port of the driver's log; a keeper ends when its connection to it does
    interface: str = ""  # on which keepers listen; "": the one that leads to the driver


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A keeper's file to append to, from byte `at` on."""

    file: BinaryIO
    number: int
    at: int
    directory: str  # on whose disk it is


# Requests to a keeper.


@dataclass(frozen=True, slots=True)
class Borrow:
    """Asks for a file to append to, for this task alone. When the connection ends, it is cut to its last commit."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Makes the borrowed file permanent up to byte `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class Open:
    """Asks for a file to read, on this host."""

    number: int


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for committed bytes of a file, on other hosts. They are the answer, without a frame."""

    number: int
    at: int
    length: int


# A keeper's answers. Those to `Borrow` and `Open` precede a descriptor, which is sent with the byte A_FILE.


@dataclass(frozen=True, slots=True)
class Keeping:
    """The first message of a keeper, unasked: where it listens."""

    address: str


@dataclass(frozen=True, slots=True)
class Lent:
    """The number of the borrowed file, which is written from byte `at` on, and the folder on whose disk it is."""

    number: int
    at: int
    directory: str


@dataclass(frozen=True, slots=True)
class Done:
    """Success."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The disk refuses a file."""

    folder: str
    problem: str


class Kept(Closing):
    """A connection to a keeper."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(STALLED.total_seconds())
        self.address = Kinds(Keeping).receive(connection).address
        self._local = connection.family == socket.AF_UNIX
        self._files: dict[int, BinaryIO] = {}

    @classmethod
    def here(cls, secret: bytes) -> "Kept | None":
        """Connect to this host's keeper; returns None if there is none. Raises `SourceError` if it ends meanwhile."""
        try:
            return cls._connected(local_name(secret).encode(), secret)
        except ConnectionRefusedError:
            return None
        except (OSError, EOFError) as error:
            raise _lost(f"{socket.gethostname()}, this host", error) from error

    @classmethod
    def _connected(cls, address: str | bytes, secret: bytes) -> Self:
        connection, _ = dial(address, secret, me=b"task", deadline=Deadline(HANDSHAKE_TIMEOUT))
        try:
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def started(cls, plan: KeeperPlan) -> "Kept":
        """Connect to this host's keeper, and start it if there is none.

        Blocks until it listens. Raises `SourceError` if it does not within `START_TIMEOUT`, or cannot start."""
        give_up = time.monotonic() + START_TIMEOUT.total_seconds()
        while (kept := cls.here(plan.secret)) is None:
            with socket.socket(socket.AF_UNIX) as turn:
                try:
                    turn.bind(f"{local_name(plan.secret)}-starts")
                except OSError:
                    time.sleep(0.005)  # another task is starting it
                else:
                    _start(plan)
            if time.monotonic() >= give_up:
                raise SourceError("the keeper of dealt rows", f"cannot be reached after {START_TIMEOUT}")
        return kept

    @classmethod
    def at(cls, address: str, secret: bytes) -> Self:
        """Connect to the keeper of another host. Raises `SourceError` if it cannot be reached."""
        try:
            return cls._connected(address, secret)
        except (OSError, EOFError, RendezvousError) as error:
            raise _lost(address, error) from error

    def borrow(self) -> Borrowed:
        """Borrow a file of this host's keeper, to append rows that `commit` then makes permanent.

        Raises `CacheError` if the keeper's disk refuses a file, `SourceError` if the keeper is gone."""
        lent = self._ask(Borrow(), Lent)
        return Borrowed(self._receive_file("r+b"), lent.number, lent.at, lent.directory)

    def commit(self, end: int) -> None:
        """Make the keeper keep the borrowed file up to byte `end`. Raises `SourceError` if it is gone."""
        self._ask(Commit(end), Done)

    def copy(self, number: int, at: int, length: int, out: BinaryIO) -> None:
        """Copy `length` committed bytes of file `number`, from byte `at` on, to the position of `out`.

        Raises `SourceError` if the keeper is gone; an `OSError` of the disk of `out` propagates."""
        if not self._local:
            self._receive(Read(number, at, length), out)
            return
        file = self._opened(number)
        while length:
            copied = os.sendfile(out.fileno(), file.fileno(), at, length)
            if not copied:
                raise _lost(self.address, EOFError(f"{length} bytes are missing"))
            at, length = at + copied, length - copied

    def close(self) -> None:
        """End the connection."""
        for file in self._files.values():
            file.close()
        self._connection.close()

    def _ask(self, request: Borrow | Commit | Open, answer: type[A]) -> A:
        try:
            send(self._connection, request)
            got = Kinds[A | Refused](answer, Refused).receive(self._connection)
        except (OSError, EOFError) as error:
            raise _lost(self.address, error) from error
        if isinstance(got, Refused):
            raise CacheError(got.folder, got.problem)
        return got

    def _opened(self, number: int) -> BinaryIO:
        """Open a file of this host's keeper; it stays readable when the keeper is gone."""
        if number not in self._files:
            self._ask(Open(number), Done)
            self._files[number] = self._receive_file("rb")
        return self._files[number]

    def _receive_file(self, mode: Literal["rb", "r+b"]) -> BinaryIO:
        """Receive the descriptor that follows an answer; its file position is shared with the keeper and all tasks."""
        try:
            _, fds, _, _ = socket.recv_fds(self._connection, len(A_FILE), 1)
        except OSError as error:
            raise _lost(self.address, error) from error
        if not fds:
            raise _lost(self.address, EOFError("it sent no file"))
        return open(fds[0], mode, buffering=0)

    def _receive(self, request: Read, out: BinaryIO) -> None:
        """Send a request to read, and write the bytes of the answer to `out`."""
        length = request.length
        buffer = bytearray(min(length, READ_PIECE))
        with memoryview(buffer) as view:
            try:
                send(self._connection, request)
            except OSError as error:
                raise _lost(self.address, error) from error
            while length:
                try:
                    got = self._connection.recv_into(view[: min(length, READ_PIECE)])
                except OSError as error:
                    raise _lost(self.address, error) from error
                if not got:
                    raise _lost(self.address, EOFError(f"{length} bytes are missing"))
                _write_all(out, view[:got])
                length -= got


def _write_all(out: BinaryIO, data: memoryview) -> None:
    """Write all of `data`; a file without a buffer may take less at a time."""
    while data:
        data = data[out.write(data) :]


def _lost(address: str, error: Exception) -> RowsLost:
    return RowsLost(
        f"rows kept at {address}",
        f"are gone, or out of reach ({error}); run the job again, with executors that reach each other on all ports",
    )


def _start(plan: KeeperPlan) -> None:
    """Start this host's keeper; returns when it listens, or when another process has its name. Raises `SourceError`."""
    settings = {"secret": plan.secret.hex(), "driver": plan.driver, "interface": plan.interface}
    command = [sys.executable, "-P", "-m", "farandole.spark.rows.exchange.keeper"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command, input=json.dumps(settings), env=env, capture_output=True, text=True,
            timeout=START_TIMEOUT.total_seconds(),
        )  # fmt: skip
        problem = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"it did not start within {START_TIMEOUT.total_seconds():g} s"
    if problem:
        raise SourceError(
            "rows for the ranks",
            f"the process that keeps them on {socket.gethostname()} cannot be started ({problem}); it must be able to "
            f"reach the driver at {plan.driver}, where this executor sends the ranks' output as well",
        )
