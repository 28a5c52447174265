"""A task's way to the keepers of dealt rows: its own host's, which it starts where there is none, and other hosts'."""

import hmac
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from farandole.dialer import dial
from farandole.errors import CacheError, RendezvousError, SourceError
from farandole.handshake import Deadline, recv_frame, send_frame

__all__ = [
    "A_FILE",
    "HANDSHAKE_TIMEOUT",
    "KEEPER",
    "LARGEST_REQUEST",
    "STALLED",
    "Borrowed",
    "KeeperPlan",
    "Kept",
    "RowsLost",
    "keeper_identity",
    "keeper_of",
    "local_name",
]

A_FILE = b"f"  # a descriptor comes along with it
KEEPER = b"keeper"  # begins its identity
HANDSHAKE_TIMEOUT = timedelta(seconds=10)
START_TIMEOUT = timedelta(seconds=60)
STALLED = timedelta(seconds=60)  # without a byte, on a connection between hosts
LARGEST_REQUEST = 4096  # bytes
READ_PIECE = 1 << 20  # bytes


def local_name(secret: bytes) -> str:
    """Spell the keeper's name on its own host, in Linux's name space without files."""
    return f"\0farandole-{hmac.digest(secret, b'the name of the keeper', 'sha256').hex()[:32]}"


class RowsLost(SourceError):
    """Dealt rows are gone with their keeper; dealt again, they would be there."""


def keeper_identity(host: str) -> bytes:
    """Spell the identity by which the keeper of `host` connects to the driver."""
    return KEEPER + b" " + host.encode()[:128]


def keeper_of(identity: bytes) -> str | None:
    """Return the host of the keeper that has this identity; None for a peer that is no keeper."""
    role, _, host = identity.partition(b" ")
    return host.decode(errors="replace") if role == KEEPER else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlan:
    """Addresses and secret by which the tasks of a job reach their keepers."""

    secret: bytes = field(repr=False)
    driver: str  # host:port of the driver's log, whose connection is a keeper's lifeline
    interface: str = ""  # where keepers listen; "": where the way to the driver begins


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A keeper's file to append to, from byte `at` on."""

    file: BinaryIO
    number: int
    at: int
    directory: str  # on whose disk it is


class Kept:
    """A connection to a keeper."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(STALLED.total_seconds())
        answer = self._next_answer()
        self.address = str(answer["address"])
        self._local = connection.family == socket.AF_UNIX
        self._files: dict[int, BinaryIO] = {}

    @classmethod
    def here(cls, secret: bytes) -> "Kept | None":
        """Connect to this host's keeper; None where there is none. Raises `SourceError` when it ends meanwhile."""
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
        """Connect to this host's keeper, which is started where there is none. Raises `SourceError` when it cannot."""
        give_up = time.monotonic() + START_TIMEOUT.total_seconds()
        while (kept := cls.here(plan.secret)) is None:
            with socket.socket(socket.AF_UNIX) as turn:
                try:
                    turn.bind(f"{local_name(plan.secret)}-starts")
                except OSError:
                    time.sleep(0.005)  # another task is about to
                else:
                    _start(plan)
            if time.monotonic() >= give_up:
                raise SourceError("the keeper of dealt rows", f"cannot be reached after {START_TIMEOUT}")
        return kept

    @classmethod
    def at(cls, address: str, secret: bytes) -> Self:
        """Connect to the keeper of another host. Raises `SourceError` when it cannot be reached."""
        try:
            return cls._connected(address, secret)
        except (OSError, EOFError, RendezvousError) as error:
            raise _lost(address, error) from error

    def borrow(self) -> Borrowed:
        """Borrow a file of this host's keeper; `commit` says how far it has been written.

        Raises `CacheError` when the disk has no room for one, `SourceError` when the keeper is gone."""
        answer = self._ask({"do": "borrow"})
        file = self._receive_file("r+b")
        return Borrowed(file, int(answer["file"]), int(answer["at"]), str(answer["directory"]))

    def commit(self, end: int) -> None:
        """Have the keeper keep what was written up to byte `end`. Raises `SourceError` when it is gone."""
        self._ask({"do": "commit", "end": end})

    def copy(self, number: int, at: int, length: int, out: BinaryIO) -> None:
        """Copy committed bytes of file `number` to where `out` stands.

        Raises `SourceError` when the keeper is gone; what the disk of `out` says passes."""
        if not self._local:
            self._receive({"do": "read", "file": number, "at": at, "length": length}, out)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        try:
            send_frame(self._connection, json.dumps(request).encode())
            answer = self._next_answer()
        except (OSError, EOFError) as error:
            raise _lost(self.address, error) from error
        if "problem" in answer:
            raise CacheError(answer["folder"], answer["problem"])
        return answer

    def _next_answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(recv_frame(self._connection, LARGEST_REQUEST))
        return answer

    def _opened(self, number: int) -> BinaryIO:
        """Open a file of this host's keeper, which stays when the keeper is gone."""
        if number not in self._files:
            self._ask({"do": "open", "file": number})
            self._files[number] = self._receive_file("rb")
        return self._files[number]

    def _receive_file(self, mode: Literal["rb", "r+b"]) -> BinaryIO:
        """Receive the descriptor that follows an answer; its position is the keeper's and everybody's."""
        try:
            _, fds, _, _ = socket.recv_fds(self._connection, len(A_FILE), 1)
        except OSError as error:
            raise _lost(self.address, error) from error
        if not fds:
            raise _lost(self.address, EOFError("it sent no file"))
        return open(fds[0], mode, buffering=0)

    def _receive(self, request: dict[str, object], out: BinaryIO) -> None:
        length = int(str(request["length"]))
        buffer = bytearray(min(length, READ_PIECE))
        with memoryview(buffer) as view:
            try:
                send_frame(self._connection, json.dumps(request).encode())
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
    """Write all of it; files without a buffer may take less at a time."""
    while data:
        data = data[out.write(data) :]


def _lost(address: str, error: Exception) -> RowsLost:
    return RowsLost(
        f"rows kept at {address}",
        f"are gone, or out of reach ({error}); run the job again, with executors that reach each other on all ports",
    )


def _start(plan: KeeperPlan) -> None:
    """Start this host's keeper; returns when it, or another one, can be reached."""
    settings = {"secret": plan.secret.hex(), "driver": plan.driver, "interface": plan.interface}
    command = [sys.executable, "-m", "farandole.spark.exchange.keeper"]
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
