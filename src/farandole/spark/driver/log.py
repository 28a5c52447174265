"""Server of a job's driver, which shows the ranks' lines and messages, and collects their failures."""

import contextlib
import functools
import json
import logging
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Literal, Self, TypeAlias

from farandole.errors import ConfigError, FarandoleError
from farandole.launch.failures import Failure, culprit, from_payload
from farandole.limits import require_open_files
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.handshake import join_address, recv_frame, send_frame
from farandole.spark.driver.relay import LARGEST_FRAME, SILENT
from farandole.spark.jobs.addresses import keep_alive
from farandole.spark.rows.exchange.access import keeper_of

__all__ = ["DriverLog", "OnMessage", "Show", "Verbosity", "show_on_console"]

log = logging.getLogger(__name__)

Verbosity: TypeAlias = Literal["all", "log_callback_only"]
OnMessage: TypeAlias = Callable[[int, dict[str, object]], None]  # rank, the message with its "kind"
Show: TypeAlias = Callable[[str, str], None]  # "stdout" or "stderr", whole lines

CLOSE_TIMEOUT = timedelta(seconds=10)  # for a connection's thread to end

VANISHED = (
    "its Spark task ended without a report: its executor or its connection to the driver was lost, or its Python "
    "process was killed (the system's out-of-memory killer does that); see the executor's log"
)

_KEEPER = -1  # in place of a rank, for connections of keepers: see exchange/keeper.py


def show_on_console(stream: str, text: str) -> None:
    """Write `text` to the current `sys.stdout` or `sys.stderr`, which notebooks and tests replace."""
    target = sys.stderr if stream == "stderr" else sys.stdout
    target.write(text)
    target.flush()


class _Peer:
    """Connection of a task, with its rank, or of a keeper; any thread may send on it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, object]) -> None:
        with self._sending, contextlib.suppress(OSError):  # the other end has just gone
            send_frame(self.connection, json.dumps(message).encode())

    def dismiss(self, reason: str) -> None:
        self.send({"over": reason})


class DriverLog:
    """Server for the tasks and keepers of one job.

    Listens on `host` alone, and reads messages only from peers that have proved the job's secret. Raises `ConfigError`
    if this process may not open a connection for each of `size` ranks."""

    def __init__(
        self,
        secret: bytes,
        size: int,
        *,
        host: str,
        show: Show = show_on_console,
        on_message: OnMessage | None = None,
    ) -> None:
        self._size = size
        self._show, self._on_message = show, on_message
        self.on_attempt: Callable[[int], None] | None = None
        self.on_failure: Callable[[int, int, Failure], None] | None = None  # stage, attempt
        self.on_keeper: Callable[[], None] | None = None
        self.on_lost_keeper: Callable[[], None] | None = None
        self._keepers: dict[_Peer, str] = {}  # the host of each
        self._lost_keepers: list[str] = []
        self._failures: list[tuple[int, Failure]] = []  # each with its attempt
        self._peers: set[_Peer] = set()
        self._cancelled: str | None = None
        self.feeds_again = False  # whether ranks of a repeated stage may ask for their rows again
        self._fed: set[int] = set()
        self.attempt_of: Callable[[int], int] = lambda stage: 0  # Spark's number, from 1; 0: unknown
        self._attempt = 0  # the newest attempt of which a task has connected
        self._begun: Counter[int] = Counter()  # how often a task of each rank has connected
        self._tasks: dict[_Peer, tuple[int, int]] = {}  # stage and attempt of a task that has not ended
        self._vanished: list[tuple[int, int]] = []  # attempt and rank of tasks that ended without a report
        self._meeting: dict[int, tuple[_Peer, str]] = {}  # connection and "meet" text of each rank so far
        self._over = False  # keepers are no longer needed
        self._closing = False
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        # Every rank holds a connection until it ends.
        require_open_files(size, f"{size} ranks", functools.partial(ConfigError, "num_proc"))
        listener = listen(host)
        self.port = int(listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        acceptor = Acceptor([listener], secret, me=b"driver", service="the driver's log", members=size)
        self._accepting = AcceptingThread(acceptor, self._admit, name="farandole-driver-log")

    def address(self, host: str) -> str:
        """Return the address of this server for executors that know the driver as `host`."""
        return join_address(host, self.port)

    @property
    def failures(self) -> list[Failure]:
        """Return the failures of the newest attempt so far, in the order in which they were reported."""
        with self._changed:
            return self._failures_of(self._attempt)

    def failure_of(self, attempt: int) -> Failure | None:
        """Return the failure that ended an attempt; None if none is known.

        A task that has ended without a report comes before tasks that only lost it."""
        with self._changed:
            failures = self._failures_of(attempt)
            gone = [rank for number, rank in self._vanished if number == attempt]
        reported = culprit(failures) if failures else None
        if gone and (reported is None or reported.consequence):
            return Failure(rank=gone[0], reason=VANISHED, code=1, killed=True)
        return reported

    @property
    def lost_keepers(self) -> list[str]:
        """The hosts whose keeper ended, and lost its rows, before the driver dismissed it."""
        with self._changed:
            return list(self._lost_keepers)

    @property
    def feeding(self) -> bool:
        """True until the first rank has its rows; until then no rank's function has begun."""
        with self._changed:
            return not self._fed

    def cancel(self, reason: str) -> None:
        """Make all tasks end their ranks, those that connect later as well."""
        with self._changed:
            self._cancelled = reason
            connected = list(self._peers)
        for peer in connected:
            peer.dismiss(reason)

    def drain(self, patience: timedelta) -> None:
        """Dismiss the keepers, and wait up to `patience` until all peers have sent everything and disconnected."""
        self._dismiss_keepers()
        with self._changed:
            self._changed.wait_for(lambda: not self._peers, patience.total_seconds())

    def wait_for_failure(self, patience: timedelta) -> None:
        """Wait up to `patience` until the failure of a rank or the loss of a keeper is known.

        Spark may have reported it earlier."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._lost_keepers or any(not failure.consequence for failure in self._failures_of(self._attempt))
                ),
                patience.total_seconds(),
            )

    def close(self) -> None:
        """End all connections and threads."""
        self._accepting.close()
        with self._changed:
            self._closing = True
            connected = list(self._peers)
        for peer in connected:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT.total_seconds())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _admit(self, admitted: Admitted) -> None:
        keeper = keeper_of(admitted.who)
        rank = int(admitted.who) if keeper is None else _KEEPER
        if rank != _KEEPER and not 0 <= rank < self._size:
            raise ValueError(f"there is no rank {rank} among {self._size} ranks")
        peer = _Peer(rank, admitted.sock)
        with self._changed:
            self._peers.add(peer)
            if keeper is not None:
                self._keepers[peer] = keeper
        name = "farandole-driver-log-rank"
        thread = threading.Thread(target=self._serve, args=(peer,), name=name, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _serve(self, peer: _Peer) -> None:
        try:
            with peer.connection:
                keep_alive(peer.connection, SILENT)
                self._welcome(peer)
                while True:
                    self._handle(peer, json.loads(recv_frame(peer.connection, LARGEST_FRAME)))
        except (OSError, EOFError):
            pass  # the peer has disconnected
        except (FarandoleError, ValueError) as error:
            log.warning("the driver's log ended its connection with rank %d: %s", peer.rank, error)
        finally:
            with self._changed:
                host = self._keepers.pop(peer, None)
                # A keeper ends at the driver's first message.
                dismissed = self._over or self._closing or self._cancelled is not None
                lost = host is not None and not dismissed
                if host is not None and lost:
                    self._lost_keepers.append(host)
                if peer in self._tasks and self._cancelled is None:
                    self._vanished.append((self._tasks.pop(peer)[1], peer.rank))
                self._peers.remove(peer)
                self._changed.notify_all()
            if lost:
                log.warning("the keeper of dealt rows on %s has ended too early, and its rows are lost", host)
                if self.on_lost_keeper is not None:
                    self.on_lost_keeper()

    def _welcome(self, peer: _Peer) -> None:
        with self._changed:
            reason = "too late" if self._over and peer.rank == _KEEPER else self._cancelled
        if reason is not None:
            peer.dismiss(reason)
        if peer.rank == _KEEPER and self.on_keeper is not None:
            self.on_keeper()

    def _dismiss_keepers(self) -> None:
        with self._changed:
            self._over = True
            keepers = [peer for peer in self._peers if peer.rank == _KEEPER]
        for peer in keepers:
            peer.dismiss("no rank needs the rows any more")

    def _meet(self, peer: _Peer, stage: int, text: str) -> None:
        """Send the "meet" texts of all ranks to every rank, once all ranks have sent theirs.

        Does so only if Spark does not repeat the stage, or has not done so yet: tasks do not know their attempt, and
        tasks of two attempts must not meet."""
        with self._changed:
            self._meeting[peer.rank] = peer, text
            if len(self._meeting) < self._size:
                return
            met, self._meeting = self._meeting, {}
        if not self.feeds_again or self.attempt_of(stage) == 1:
            message = {"met": [met[rank][1] for rank in range(self._size)]}
            for each, _ in met.values():
                each.send(message)

    def _handle(self, peer: _Peer, messages: list[dict[str, object]]) -> None:
        rank = peer.rank
        out: dict[str, list[str]] = {}
        for message in messages:
            kind, payload = message["kind"], message["payload"]
            assert isinstance(payload, dict), message
            if kind == "line":
                out.setdefault(str(payload["stream"]), []).append(f"[{rank}] {payload['text']}\n")
            elif kind == "log":
                out.setdefault("stdout", []).append(f"[{rank}] {payload['text']}\n")
            elif kind == "dropped":
                lost = (
                    f"[{rank}] ... {payload['messages']} lines were dropped, faster than the driver could show them\n"
                )
                out.setdefault("stdout", []).append(lost)
            elif kind == "begin":
                self._begin(peer, int(str(payload["stage"])))
            elif kind == "done":
                with self._changed:
                    self._tasks.pop(peer, None)
            elif kind == "meet":
                self._meet(peer, int(str(payload["stage"])), str(payload["text"]))
            elif kind == "fed":
                with self._changed:
                    self._fed.add(rank)
                    all_fed = len(self._fed) == self._size
                if all_fed and not self.feeds_again:
                    self._dismiss_keepers()
            elif kind == "failed":
                self._note(peer, from_payload(rank, payload, time.monotonic()))
            else:
                self._pass_on(rank, {"kind": kind, **payload})
        with self._writing:
            for stream, lines in out.items():
                try:
                    self._show(stream, "".join(lines))
                except Exception as error:  # the user's stream is full or closed, or lacks a method
                    log.warning("output of rank %d cannot be shown (%r)", rank, error)

    def _begin(self, peer: _Peer, stage: int) -> None:
        """Determine the attempt of the stage to which a task belongs; tasks do not know it."""
        known = self.attempt_of(stage)
        with self._changed:
            self._begun[peer.rank] += 1
            # Spark's number may lag behind. A rank has one task in each attempt.
            attempt = max(known, self._begun[peer.rank])
            self._tasks[peer] = stage, attempt
            newer, self._attempt = attempt > self._attempt, max(attempt, self._attempt)
        if self.on_attempt is not None and newer:
            self.on_attempt(attempt)

    def _failures_of(self, attempt: int) -> list[Failure]:
        return [failure for number, failure in self._failures if number == attempt]

    def _note(self, peer: _Peer, failure: Failure) -> None:
        with self._changed:
            stage, attempt = self._tasks.pop(peer, (-1, self._attempt))
            self._failures.append((attempt, failure))
            self._changed.notify_all()
        if self.on_failure is not None:
            self.on_failure(stage, attempt, failure)

    def _pass_on(self, rank: int, message: Mapping[str, object]) -> None:
        if self._on_message is None:
            return
        try:
            self._on_message(rank, dict(message))
        except Exception:
            log.exception("on_message failed for a message of rank %d", rank)
