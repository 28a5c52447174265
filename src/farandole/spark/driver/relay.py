"""Connection of a barrier task to the driver's log, for a rank's lines, messages and failure; it blocks no training."""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from farandole.errors import FarandoleError
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, Kinds, encode, frame, send_frame
from farandole.spark.jobs.addresses import keep_alive

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = timedelta(seconds=10)
SILENT = timedelta(minutes=4)  # after which a connection to a lost machine ends; firewalls forget idle ones later
LARGEST_FRAME = 16 << 20  # bytes; above any batch of lines, messages and one failure
MOST_WAITING = 10_000  # messages; lines of a rank that prints faster than the driver reads are dropped and counted
MOST_LOGGED = 2 * MOST_WAITING
BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """A message of a rank: a line, its end, a failure, or one of the user's kinds. One frame has several."""

    kind: str
    payload: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Met:
    """The driver's message with the "meet" texts of all ranks."""

    texts: list[str]


@dataclass(frozen=True, slots=True)
class Over:
    """The driver's order to end the rank, or the keeper."""

    reason: str


class Relay:
    """Sender of one rank's messages to the driver's log, on a thread of its own.

    `on_cancel` receives the driver's reason to end the rank. `on_met` receives the "meet" texts of all ranks, in rank
    order, once all ranks have sent one. If the driver cannot be reached, or no longer, the relay logs a warning, and
    training continues."""

    def __init__(
        self,
        address: str,
        rank: int,
        secret: bytes,
        on_cancel: Callable[[str], None],
        on_met: Callable[[list[str]], None],
    ) -> None:
        self._address, self._rank, self._secret = address, rank, secret
        self._on_cancel, self._on_met = on_cancel, on_met
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._closing = False
        self._broken = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"farandole-relay-{rank}", daemon=True)
        self._thread.start()

    def send(self, kind: str, payload: Mapping[str, object], *, must: bool = False) -> None:
        """Queue a message if there is room, with `must` in any case; never blocks.

        The user's messages, of kind "log", have twice the room of other messages, so that lines leave some for them.
        Does nothing once the connection has failed."""
        record = frame(encode(Report(kind, payload)))
        with self._changed:
            if self._broken:
                return
            if len(self._waiting) >= (MOST_LOGGED if kind == "log" else MOST_WAITING) and not must:
                self._dropped += 1
                return
            self._waiting.append(record)
            self._changed.notify_all()

    def close(self, patience: timedelta) -> None:
        """Send the queued messages, for at most `patience`, and end the connection."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(patience.total_seconds())

    def _run(self) -> None:
        problem, remedy = "cannot reach", ". Executors must be able to connect to spark.driver.host"
        try:
            me = str(self._rank).encode()
            connection, _ = dial(self._address, self._secret, me=me, deadline=Deadline(CONNECT_TIMEOUT))
            problem, remedy = "has lost its connection to", ""
            with connection:
                keep_alive(connection, SILENT)
                threading.Thread(
                    target=self._listen, args=(connection,), name=f"farandole-cancel-{self._rank}", daemon=True
                ).start()
                self._pump(connection)
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, FarandoleError) as error:
            log.warning(
                "rank %d %s the driver's log at %s (%s); its output is in this executor's log only%s",
                self._rank, problem, self._address, error, remedy,
            )  # fmt: skip
        finally:
            with self._changed:
                self._broken = True
                self._waiting.clear()

    def _pump(self, connection: socket.socket) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                batch: list[bytes] = []
                size = 0
                while self._waiting and (not batch or size + len(self._waiting[0]) < BATCH_BYTES):
                    batch.append(self._waiting.popleft())
                    size += len(batch[-1])
                dropped, self._dropped = self._dropped, 0
                if dropped:
                    batch.append(frame(encode(Report("dropped", {"messages": dropped}))))
            if not batch:
                return
            send_frame(connection, b"".join(batch))

    def _listen(self, connection: socket.socket) -> None:
        """Receive the driver's messages: the "meet" texts of all ranks, or the reason why the job is over."""
        while True:
            try:
                message = Kinds[Met | Over](Met, Over).receive(connection, limit=LARGEST_FRAME)
            except (OSError, EOFError, FarandoleError):
                return  # one end has closed it; a lost connection does not end the training
            if isinstance(message, Met):
                self._on_met(message.texts)
            else:
                self._on_cancel(message.reason)
