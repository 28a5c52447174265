"""Channel between the process that starts a rank and the worker in the rank's own process.

A pair of connected sockets without a name. Both ends belong to one user and one job, so each trusts the other.

    worker -> launcher   READY, when it has started
    launcher -> worker   SETUP (a `_Setup`) and CALL (the pickled function and arguments)
    launcher -> worker   ORDERS (a `_Begin`) with open files; the call begins
    worker -> launcher   MESSAGE (a `_Message`), any number while the call runs
    worker -> launcher   OUTCOME (a pickled `WorkerValue` or `WorkerFailure`)

Records are received whole or not at all. Longer items are cut into several records, between which messages may come.
"""

import contextlib
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from farandole.meeting.frames import decode, encode

WORKER_FD = "FARANDOLE_WORKER_FD"  # the variable with a worker's descriptor
LARGEST_MESSAGE = 64 * 1024  # bytes
MOST_FILES = 64  # in orders; Linux passes no more than 253 at once
PATIENCE = 2.0  # seconds for which a message to the user waits for room

# The first byte of a record: the kind of the item, with _MORE if further records of the item follow.
READY, SETUP, CALL, ORDERS, MESSAGE, OUTCOME = range(6)
_MORE = 0x80

OnMessage: TypeAlias = Callable[[str, Mapping[str, object]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """The start signal of a call: variables to set, files to hand over, whether the launcher wants the value."""

    env: Mapping[str, str] = field(default_factory=dict)
    fds: Sequence[int] = ()
    keep: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerValue:
    """The function's value, pickled."""

    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """The function's exception, as far as it can be pickled."""

    reason: str  # "ValueError: the text", or a sentence if there was no exception
    traceback: str
    at: float  # time.monotonic() when it was caught
    code: int  # the exit code of the worker
    consequence: bool  # whether it reports that another rank failed
    exception: bytes  # from `dump_exception`


Outcome: TypeAlias = WorkerValue | WorkerFailure


@dataclass(frozen=True, slots=True)
class _Setup:
    """`sys.path` of the call, and the "module:function" that makes it."""

    paths: list[str]
    runner: str


@dataclass(frozen=True, slots=True)
class _Begin:
    """`Orders` without the files, whose descriptors come with it."""

    env: Mapping[str, str]
    keep: bool


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of the worker, and the number of those before it for which there was no room."""

    kind: str
    payload: Mapping[str, object]
    dropped: int


def open_channel() -> tuple["LauncherEnd", socket.socket]:
    """Make a channel; return the launcher's end, and the socket for the worker's `WorkerEnd`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return LauncherEnd(ours), theirs


class _End:
    """One end: sends and receives items of any size, each of a kind. One thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pieces: dict[int, list[bytes]] = {}

    def close(self) -> None:
        """Close this end; items that were sent still arrive."""
        self._socket.close()

    def _send(self, kind: int, item: bytes, fds: Sequence[int] = ()) -> None:
        """Send `item`, with `fds` if it fits one record; blocks until the other end has room."""
        whole = memoryview(item)
        while len(whole) > LARGEST_MESSAGE:
            self._socket.sendmsg([bytes([kind | _MORE]), whole[:LARGEST_MESSAGE]])
            whole = whole[LARGEST_MESSAGE:]
        socket.send_fds(self._socket, [bytes([kind]), whole], list(fds))

    def _receive(self) -> tuple[int, bytes, list[int]]:
        """Wait for an item: its kind, its bytes, its files; raises `EOFError` when the other end is closed."""
        while True:
            try:
                record, fds, _, _ = socket.recv_fds(self._socket, 1 + LARGEST_MESSAGE, MOST_FILES)
            except ConnectionResetError:
                continue  # Linux reports once that the other end left records unread; those it has sent come next
            if not record:
                raise EOFError("the channel was closed")
            kind = record[0] & ~_MORE
            self._pieces.setdefault(kind, []).append(record[1:])
            if not record[0] & _MORE:
                return kind, b"".join(self._pieces.pop(kind)), fds

    def _expect(self, kind: int) -> tuple[bytes, list[int]]:
        got, item, fds = self._receive()
        assert got == kind, (got, kind)
        return item, fds


class LauncherEnd(_End):
    """The launcher's end: sends the call and its orders, receives its messages and its outcome."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._orders: Orders | None = None
        self._handed_over = False
        self._lock = threading.Lock()

    def hand_over(self, paths: Sequence[str], runner: str, call: bytes, start_timeout: timedelta) -> None:
        """Send the call to the worker once it has started; raises `TimeoutError` after `start_timeout`.

        Blocks until the worker has received the call; raises `OSError` or `EOFError` if it ends before it starts."""
        self._socket.settimeout(start_timeout.total_seconds())
        self._expect(READY)
        self._socket.settimeout(None)
        # A worker that has failed meanwhile may be gone; its outcome can still be received.
        with contextlib.suppress(OSError):
            self._send(SETUP, encode(_Setup(list(paths), runner)))
            self._send(CALL, call)
            with self._lock:
                self._handed_over = True
                self._send_orders()

    def begin(self, orders: Orders) -> None:
        """Let the call begin as soon as the worker has it; the files in `orders` must stay open until it has ended."""
        with self._lock:
            self._orders = orders
            # A worker that is gone receives no orders; its exit code gives the reason.
            with contextlib.suppress(OSError):
                self._send_orders()

    def receive_outcome(self, on_message: OnMessage) -> Outcome:
        """Wait without a time limit for the end of the call; pass its messages to `on_message`.

        Raises `EOFError` or `OSError` if the worker is gone, after passing on all of its messages."""
        while True:
            kind, item, _ = self._receive()
            if kind == OUTCOME:
                outcome = pickle.loads(item)
                assert isinstance(outcome, (WorkerValue, WorkerFailure)), outcome
                return outcome
            assert kind == MESSAGE, kind
            message = decode(item, _Message)
            if message.dropped:
                on_message("dropped", {"messages": message.dropped})
            on_message(message.kind, message.payload)

    def _send_orders(self) -> None:
        if self._handed_over and self._orders is not None:
            self._send(ORDERS, encode(_Begin(dict(self._orders.env), self._orders.keep)), self._orders.fds)
            self._orders = None


class WorkerEnd(_End):
    """The worker's end; messages may be sent from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._dropped = 0
        self._lock = threading.Lock()

    def receive_call(self) -> tuple[list[str], str, bytes]:
        """Wait for the call: `sys.path`, the name of the runner, and the pickled function and arguments."""
        self._send(READY, b"")
        setup = decode(self._expect(SETUP)[0], _Setup)
        return setup.paths, setup.runner, self._expect(CALL)[0]

    def receive_orders(self) -> Orders:
        """Wait until the call may begin; raises `EOFError` if the launcher ends before."""
        # No deadline: a Spark task may write rows for an hour before. If the launcher ends, the wait ends with end of
        # file, and the guard kills this process.
        record, fds = self._expect(ORDERS)
        begin = decode(record, _Begin)
        return Orders(env=begin.env, fds=fds, keep=begin.keep)

    def send(self, kind: str, payload: Mapping[str, object], *, patient: bool = False) -> bool:
        """Send a message; return False if there was no room (`patient`: for 2 s) and it was dropped.

        Raises `ValueError` for a message over 64 KiB, `TypeError` for values that JSON does not know."""
        with self._lock:
            record = encode(_Message(kind, payload, self._dropped))
            if len(record) > LARGEST_MESSAGE:
                raise ValueError(f"a message of {len(record)} bytes is over the limit of {LARGEST_MESSAGE}")
            sent = self._send_now(record, time.monotonic() + (PATIENCE if patient else 0.0))
            self._dropped = 0 if sent else self._dropped + 1
            return sent

    def send_outcome(self, outcome: Outcome) -> None:
        """Send the call's outcome; blocks until the launcher has taken it."""
        self._send(OUTCOME, pickle.dumps(outcome))

    def _send_now(self, record: bytes, give_up: float) -> bool:
        while True:
            try:
                self._socket.sendmsg([bytes([MESSAGE]), record], [], socket.MSG_DONTWAIT)
                return True
            except BlockingIOError:
                left = give_up - time.monotonic()
                if left <= 0:
                    return False
                poller = select.poll()  # select.select refuses descriptors from 1024 on
                poller.register(self._socket, select.POLLOUT)
                poller.poll(left * 1000)
            except OSError:
                return False  # the launcher is gone, and the guard is about to kill this process
