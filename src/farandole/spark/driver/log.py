"""Server of a job's driver, which shows the ranks' lines and messages, and collects their failures."""

import contextlib
import functools
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Literal, TypeAlias

from farandole.closing import Closing
from farandole.errors import ConfigError, FarandoleError
from farandole.launch.failures import from_payload
from farandole.limits import require_open_files
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address
from farandole.meeting.frames import decode, recv_frame, split_frames
from farandole.spark.driver.failures import Failures
from farandole.spark.driver.keepers import Keepers
from farandole.spark.driver.meeting import Meeting
from farandole.spark.driver.peers import Job, Peer
from farandole.spark.driver.relay import LARGEST_FRAME, SILENT, Report
from farandole.spark.jobs.addresses import keep_alive
from farandole.spark.rows.exchange.access import keeper_of

log = logging.getLogger(__name__)

Verbosity: TypeAlias = Literal["all", "log_callback_only"]
OnMessage: TypeAlias = Callable[[int, dict[str, object]], None]  # rank, the message with its "kind"
Show: TypeAlias = Callable[[str, str], None]  # "stdout" or "stderr", whole lines

CLOSE_TIMEOUT = timedelta(seconds=10)  # for a connection's thread to end


def show_on_console(stream: str, text: str) -> None:
    """Write `text` to the current `sys.stdout` or `sys.stderr`, which notebooks and tests replace."""
    target = sys.stderr if stream == "stderr" else sys.stdout
    target.write(text)
    target.flush()


class DriverLog(Closing):
    """Server for the tasks and keepers of one job, whose `failures` and `keepers` it follows.

    Listens on `host` alone, and reads messages only from peers that have proved the job's secret. `show` receives the
    ranks' lines, `on_message` their other messages, and `job` what concerns Spark's job. Raises `ConfigError` if this
    process may not open a connection for each of `size` ranks."""

    def __init__(
        self,
        secret: bytes,
        size: int,
        *,
        host: str,
        show: Show = show_on_console,
        on_message: OnMessage | None = None,
        job: Job | None = None,
    ) -> None:
        self._size = size
        self._show, self._on_message = show, on_message
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._job = job = job or Job()
        self.failures = Failures(job, self._changed)
        self.keepers = Keepers(job, size, self._changed)
        self._meeting = Meeting(job, size)
        self._peers: set[Peer] = set()
        self._cancelled: str | None = None
        self._closing = False
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

    def cancel(self, reason: str) -> None:
        """Make all tasks end their ranks, those that connect later as well."""
        with self._changed:
            self._cancelled = reason
            connected = list(self._peers)
        for peer in connected:
            peer.dismiss(reason)

    def drain(self, patience: timedelta) -> None:
        """Dismiss the keepers, and wait up to `patience` until all peers have sent everything and disconnected."""
        self.keepers.dismiss()
        with self._changed:
            self._changed.wait_for(lambda: not self._peers, patience.total_seconds())

    def wait_for_failure(self, patience: timedelta) -> None:
        """Wait up to `patience` until the failure of a rank or the loss of a keeper is known.

        Spark may have reported it earlier."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.keepers.lost or any(not failure.consequence for failure in self.failures.newest),
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

    def _admit(self, admitted: Admitted) -> None:
        host = keeper_of(admitted.who)
        if host is not None:
            peer = Peer(admitted.sock, host=host)
        elif 0 <= (rank := int(admitted.who)) < self._size:
            peer = Peer(admitted.sock, rank=rank)
        else:
            raise ValueError(f"there is no rank {rank} among {self._size} ranks")
        with self._changed:
            self._peers.add(peer)
        name = "farandole-driver-log-rank"
        thread = threading.Thread(target=self._serve, args=(peer,), name=name, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _serve(self, peer: Peer) -> None:
        try:
            with peer.connection:
                keep_alive(peer.connection, SILENT)
                with self._changed:
                    cancelled = self._cancelled
                if cancelled is not None:
                    peer.dismiss(cancelled)
                if peer.is_keeper:
                    self.keepers.welcome(peer)
                while True:
                    batch = split_frames(memoryview(recv_frame(peer.connection, LARGEST_FRAME)))
                    self._handle(peer, [decode(bytes(each), Report) for each in batch])
        except (OSError, EOFError):
            pass  # the peer has disconnected
        except (FarandoleError, ValueError) as error:
            log.warning("the driver's log ended its connection with %s: %s", peer, error)
        finally:
            self._part(peer)

    def _part(self, peer: Peer) -> None:
        with self._changed:
            cancelled = self._cancelled is not None
            if not cancelled:
                self.failures.vanish(peer)
            lost = peer.is_keeper and self.keepers.leave(peer, dismissed=cancelled or self._closing)
            self._peers.remove(peer)
            self._changed.notify_all()
        if lost:
            log.warning("the keeper of dealt rows on %s has ended too early, and its rows are lost", peer.host)
            self._job.on_lost_keeper(begun=not self.keepers.feeding)

    def _handle(self, peer: Peer, messages: list[Report]) -> None:
        lines: dict[str, list[str]] = {}
        for message in messages:
            kind, payload = message.kind, message.payload
            if kind == "line":
                lines.setdefault(str(payload["stream"]), []).append(str(payload["text"]))
            elif kind == "log":
                lines.setdefault("stdout", []).append(str(payload["text"]))
            elif kind == "dropped":
                lost = f"... {payload['messages']} lines were dropped, faster than the driver could show them"
                lines.setdefault("stdout", []).append(lost)
            elif kind == "begin":
                self.failures.begin(peer, int(str(payload["stage"])))
            elif kind == "done":
                self.failures.end(peer)
            elif kind == "meet":
                self._meeting.arrive(peer, int(str(payload["stage"])), str(payload["text"]))
            elif kind == "fed":
                self.keepers.fed(peer.rank)
            elif kind == "failed":
                self.failures.add(peer, from_payload(peer.rank, payload, time.monotonic()))
            else:
                self._pass_on(peer.rank, {"kind": kind, **payload})
        self._show_lines(peer.rank, lines)

    def _show_lines(self, rank: int, lines: Mapping[str, Sequence[str]]) -> None:
        with self._writing:
            for stream, texts in lines.items():
                try:
                    self._show(stream, "".join(f"[{rank}] {text}\n" for text in texts))
                except Exception as error:  # the user's stream is full or closed, or lacks a method
                    log.warning("output of rank %d cannot be shown (%r)", rank, error)

    def _pass_on(self, rank: int, message: dict[str, object]) -> None:
        if self._on_message is None:
            return
        try:
            self._on_message(rank, message)
        except Exception:
            log.exception("on_message failed for a message of rank %d", rank)
