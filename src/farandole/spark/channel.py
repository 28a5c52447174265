"""The socket between a barrier task and its rank: orders and rows go in, messages for the driver come out.

It is local to the machine, has a name that only the two know, and each end checks that the other belongs to the
same user. Records are received whole or not at all, so that no end ever waits for the rest of one.
"""

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from farandole.errors import AuthenticationError

__all__ = ["LARGEST_RECORD", "MOST_SHARDS", "OnMessage", "Orders", "RankEnd", "TaskEnd", "same_user"]

log = logging.getLogger(__name__)

LARGEST_RECORD = 64 * 1024  # bytes
MOST_SHARDS = 64  # DataFrames of a job; Linux passes no more than 253 files at once
PATIENCE = 2.0  # seconds that a message for the user waits for room

OnMessage: TypeAlias = Callable[[str, Mapping[str, object]], None]

_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the task tells its rank when all tasks have met: variables to set, and a file for each DataFrame."""

    env: Mapping[str, str]
    shard_fds: Sequence[int]


class TaskEnd:
    """The task's end: waits for the rank on a thread of its own, gives it its orders, and hears its messages."""

    def __init__(self, on_message: OnMessage) -> None:
        self.name = f"farandole-{secrets.token_hex(16)}"
        self._on_message = on_message
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_abstract(self.name))
        self._listener.listen(1)
        self._orders: Orders | None = None
        self._ready = threading.Event()
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="farandole-rank-channel", daemon=True)
        self._thread.start()

    def begin(self, orders: Orders) -> None:
        """Let the rank begin as soon as it has connected; the descriptors must stay open until `close`."""
        self._orders = orders
        self._ready.set()

    def close(self) -> None:
        """Hear what the rank has already sent, and end the thread; only when the rank's process is gone."""
        with self._lock:
            self._closed = True
            # Wakes the thread when the rank never came; a connection ends by itself, with the rank.
            if self._connection is None:
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)
        self._ready.set()
        self._thread.join(PATIENCE)
        self._listener.close()

    def _run(self) -> None:
        try:
            connection = self._accept()
            if connection is None:
                return
            with connection:
                self._ready.wait()
                if self._orders is None:
                    return  # closed before all tasks had met
                record = json.dumps({"env": dict(self._orders.env)}).encode()
                socket.send_fds(connection, [record], list(self._orders.shard_fds))
                while record := connection.recv(LARGEST_RECORD):
                    self._hear(record)
        except OSError as error:
            log.debug("the rank's channel ended: %s", error)  # the rank is gone; its exit says why

    def _accept(self) -> socket.socket | None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return None  # closed
            if same_user(connection):
                with self._lock:
                    self._connection = connection
                    return connection
            connection.close()

    def _hear(self, record: bytes) -> None:
        message = json.loads(record)
        if message["dropped"]:
            self._on_message("dropped", {"messages": message["dropped"]})
        self._on_message(message["kind"], message["payload"])


class RankEnd:
    """The rank's end; messages may be sent from any thread."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(_abstract(name))
            if not same_user(self._socket):
                raise AuthenticationError("it belongs to another user", where="the Spark task's channel")
        except BaseException:
            self._socket.close()
            raise
        self._dropped = 0
        self._lock = threading.Lock()

    def receive_orders(self) -> Orders:
        """Wait for the task's orders; raises `EOFError` when it ends before."""
        # No deadline: a task may write rows for an hour before. It ends with the task, by end of file here and by
        # the guard above this process.
        record, fds, _, _ = socket.recv_fds(self._socket, LARGEST_RECORD, MOST_SHARDS)
        if not record:
            raise EOFError("the Spark task ended before all ranks had started")
        return Orders(env=json.loads(record)["env"], shard_fds=fds)

    def send(self, kind: str, payload: Mapping[str, object], *, patient: bool = False) -> bool:
        """Hand a message to the task; False when there was no room (`patient`: for a moment) and it was dropped.

        Raises `ValueError` for a message over 64 KiB, `TypeError` for values that JSON does not know."""
        with self._lock:
            record = json.dumps({"kind": kind, "payload": payload, "dropped": self._dropped}).encode()
            if len(record) > LARGEST_RECORD:
                raise ValueError(f"a message of {len(record)} bytes is over the limit of {LARGEST_RECORD}")
            sent = self._send(record, time.monotonic() + (PATIENCE if patient else 0.0))
            self._dropped = 0 if sent else self._dropped + 1
            return sent

    def close(self) -> None:
        """End the connection; what was sent before still arrives."""
        self._socket.close()

    def _send(self, record: bytes, give_up: float) -> bool:
        while True:
            try:
                self._socket.send(record, socket.MSG_DONTWAIT)
                return True
            except BlockingIOError:
                left = give_up - time.monotonic()
                if left <= 0:
                    return False
                select.select([], [self._socket], [], left)
            except OSError:
                return False  # the task is gone, and this process is about to be


def _abstract(name: str) -> str:
    return f"\0{name}"  # Linux's name space without files: nothing to remove afterwards


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a local connection belongs to our user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
