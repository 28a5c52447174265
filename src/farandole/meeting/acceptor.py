"""Listeners that admit members of a job and refuse strangers, on one thread that never blocks on a peer."""

import contextlib
import logging
import os
import queue
import resource
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from farandole.errors import FarandoleError
from farandole.meeting.addresses import join_address
from farandole.meeting.frames import Steps
from farandole.meeting.handshake import HEAD_BYTES, handshake_steps

log = logging.getLogger(__name__)

BACKLOG = 4096  # connections that the kernel holds until they are accepted; it may allow fewer
HANDSHAKE_TIMEOUT = timedelta(seconds=10)
# A member sends at once and proves itself in milliseconds. New connections evict the oldest unproven ones.
MOST_UNPROVEN = 512  # at each listener, beside the members that it expects
ACCEPTED_AT_ONCE = 64  # between two passes over the handshakes
OUT_OF_FILES_PAUSE = 0.05  # seconds without accepting, when this process has no free descriptor
WARN_EVERY = 1.0  # seconds
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen on `host`, an address or a name of this machine, by default on a free port; raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A connection whose peer has proved the secret; non-blocking, nothing after the handshake has been read."""

    sock: socket.socket
    who: bytes
    where: str


class Refusals:
    """Counter of refused connections with at most one warning per second; times are seconds of one clock."""

    def __init__(self, service: str) -> None:
        self.total = 0
        self._service = service
        self._sources: Counter[str] = Counter()
        self._latest = ""
        self._next = float("-inf")

    def note(self, source: str, why: str) -> None:
        """Count one refused connection from `source`."""
        self.total += 1
        self._sources[source] += 1
        self._latest = why

    def due(self) -> float | None:
        """Return the time of the next warning; None without refusals."""
        return self._next if self._sources else None

    def warning(self, now: float) -> str | None:
        """Return the warning that is due `now`, if any, and reset the count."""
        if not self._sources or now < self._next:
            return None
        (most, _), count = self._sources.most_common(1)[0], sum(self._sources.values())
        others = f" and {len(self._sources) - 1} other sources" if len(self._sources) > 1 else ""
        self._sources.clear()
        self._next = now + WARN_EVERY
        connections = "1 connection" if count == 1 else f"{count} connections"
        return f"{self._service} refused {connections} from {most}{others}: {self._latest}"


class _Unproven:
    """A connection during its handshake."""

    def __init__(self, sock: socket.socket, source: str, where: str) -> None:
        self.sock, self.source, self.where = sock, source, where
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT.total_seconds()
        self.watched = False  # by the selector
        self.steps: Steps[bytes] | None = None  # set once the peer has sent data
        self.inbox = bytearray()
        self.wanted = HEAD_BYTES


class _Queue:
    """Unproven connections by their source, each source's oldest first."""

    def __init__(self) -> None:
        self._sources: dict[str, dict[socket.socket, _Unproven]] = {}

    def add(self, peer: _Unproven) -> None:
        self._sources.setdefault(peer.source, {})[peer.sock] = peer

    def remove(self, peer: _Unproven) -> None:
        """Remove `peer` if it is here."""
        of_source = self._sources.get(peer.source, {})
        if of_source.pop(peer.sock, None) is not None and not of_source:
            del self._sources[peer.source]

    def first(self) -> _Unproven | None:
        """Return the oldest connection of the source that has most; None if the queue is empty."""
        most = max(self._sources.values(), key=len, default=None)
        return None if most is None else next(iter(most.values()))


class Acceptor:
    """Acceptor of connections on `listeners`, with any number of handshakes at once and without blocking on one.

    At most `most` connections are unproven at a time; the default has room on each listener for all `members` at once
    and for 512 strangers. One more connection evicts a silent one if there is any, else one in the middle of its
    handshake: of these the oldest of the source with the most of them. A source is a host for TCP and a process for
    Unix sockets. On Unix sockets other users are refused before any read. `service` names the acceptor in warnings.

    The descriptor of `fileno` becomes readable when `poll` has work; also call `poll` after `seconds_to_wait`. One
    thread at a time may use the acceptor, which owns the listeners."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        *,
        me: bytes,
        service: str,
        members: int = 0,
        most: int | None = None,
    ) -> None:
        self._secret, self._me = secret, me
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Per listener: members at one must not evict those at another, or both would connect again and again.
        room = (MOST_UNPROVEN + members) * len(listeners)
        self._most = most or (min(room, max(8, files // 2)) if files >= 0 else room)
        self._listeners = list(listeners)
        self._paused: list[tuple[float, socket.socket]] = []
        self._unproven: dict[socket.socket, _Unproven] = {}  # the oldest first
        self._silent, self._speaking = _Queue(), _Queue()
        self._admitted: list[Admitted] = []
        self.refusals = Refusals(service)
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is work."""
        assert isinstance(self._selector, (selectors.EpollSelector))
        return self._selector.fileno()

    def seconds_to_wait(self) -> float | None:
        """Return the seconds until `poll` has work without an event; None: never."""
        ends = [each.deadline for each in list(self._unproven.values())[:1]]
        ends += [until for until, _ in self._paused[:1]]
        warn = self.refusals.due()
        if warn is not None:
            ends.append(warn)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def poll(self, timeout: float | None = 0.0) -> list[Admitted]:
        """Wait up to `timeout` seconds for work, do all that is due, and return the newly admitted connections."""
        own = self.seconds_to_wait()
        limits = [each for each in (timeout, own) if each is not None]
        events = self._selector.select(min(limits) if limits else None)
        ready = [key.fileobj for key, _ in events if isinstance(key.fileobj, socket.socket)]
        # Handshakes first: a member that has answered is not evicted for a newcomer.
        for peer in [self._unproven[sock] for sock in ready if sock in self._unproven]:
            self._advance(peer)
        for listener in [listener for listener in self._listeners if listener in ready]:
            self._accept(listener)
        self._expire(time.monotonic())
        admitted, self._admitted = self._admitted, []
        return admitted

    def refuse(self, admitted: Admitted, why: str) -> None:
        """Close an admitted connection whose identity is refused, and count it."""
        self.refusals.note(admitted.where, why)
        admitted.sock.close()

    def drop(self, listener: socket.socket) -> None:
        """Close one of the listeners; its accepted connections continue."""
        self._listeners.remove(listener)
        self._paused = [each for each in self._paused if each[1] is not listener]
        with contextlib.suppress(KeyError):  # it was paused
            self._selector.unregister(listener)
        listener.close()

    def close(self) -> None:
        """Close the listeners and all unproven connections; idempotent."""
        for sock in [*self._unproven, *(each.sock for each in self._admitted)]:
            sock.close()
        self._unproven.clear()
        self._admitted.clear()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._warn(float("inf"))

    def _expire(self, now: float) -> None:
        while self._unproven and (oldest := next(iter(self._unproven.values()))).deadline <= now:
            self._refuse(oldest, "it did not finish the handshake in time")
        while self._paused and self._paused[0][0] <= now:
            self._selector.register(self._paused.pop(0)[1], selectors.EVENT_READ)
        self._warn(now)

    def _warn(self, now: float) -> None:
        warning = self.refusals.warning(now)
        if warning is not None:
            log.warning("%s", warning)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._free_descriptor(listener, error)
                return
            try:
                self._begin(sock, address)
            except OSError as error:
                sock.close()
                self.refusals.note("a peer that is gone", str(error))

    def _free_descriptor(self, listener: socket.socket, error: OSError) -> None:
        """Evict a connection to free a descriptor; if there is none to evict, stop accepting for a moment.

        The listener stays readable meanwhile, so that the loop would spin without the pause."""
        if self._unproven:
            self._evict(f"this process is out of resources ({error})")
            return
        self.refusals.note("anybody", f"cannot accept: {error}")
        self._selector.unregister(listener)
        self._paused.append((time.monotonic() + OUT_OF_FILES_PAUSE, listener))

    def _begin(self, sock: socket.socket, address: object) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            process, user, _ = _credentials(sock)
            source = where = f"process {process} of user {user}"
            if user != os.geteuid():
                sock.close()
                self.refusals.note(source, "it belongs to another user")
                return
        else:
            assert isinstance(address, tuple)
            source, where = str(address[0]), join_address(str(address[0]), int(address[1]))
        while len(self._unproven) >= self._most:
            self._evict("it made way for newer connections before it had proved the job's secret")
        peer = self._unproven[sock] = _Unproven(sock, source, where)
        self._silent.add(peer)
        # Most members have sent data by now, and many strangers have hung up.
        self._advance(peer)
        if sock in self._unproven:
            self._selector.register(sock, selectors.EVENT_READ)
            peer.watched = True

    def _evict(self, why: str) -> None:
        """Refuse the unproven connection with the lowest priority."""
        oldest = self._silent.first() or self._speaking.first()
        assert oldest is not None
        self._advance(oldest)  # it may have sent data just now
        if oldest.sock in self._unproven:
            self._refuse(oldest, why)

    def _advance(self, peer: _Unproven) -> None:
        """Continue the handshake with the data received; read nothing beyond it."""
        try:
            while more := peer.sock.recv(peer.wanted - len(peer.inbox)):
                peer.inbox += more
                if len(peer.inbox) == peer.wanted and not self._converse(peer):
                    return
            self._refuse(peer, "it hung up in the handshake")
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(peer, f"it broke off the handshake ({error})")
        except FarandoleError as error:
            self._refuse(peer, getattr(error, "problem", str(error)))

    def _converse(self, peer: _Unproven) -> bool:
        """Answer the peer; return False once it is admitted."""
        data = bytes(peer.inbox)
        peer.inbox.clear()
        if peer.steps is None:
            self._silent.remove(peer)
            self._speaking.add(peer)
            peer.steps = handshake_steps(self._secret, me=self._me, accept=True, where=peer.where)
            wanted = next(peer.steps)
            assert wanted == len(data)
        try:
            step = peer.steps.send(data)
            while isinstance(step, bytes):
                # A few hundred bytes fit into the smallest buffer of a new connection.
                if peer.sock.send(step) != len(step):
                    raise ConnectionAbortedError("its receive buffer is full")
                step = next(peer.steps)
            peer.wanted = step
        except StopIteration as done:
            self._forget(peer)
            if peer.sock.family != socket.AF_UNIX:
                peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._admitted.append(Admitted(peer.sock, done.value, peer.where))
            return False
        return True

    def _refuse(self, peer: _Unproven, why: str) -> None:
        self.refusals.note(peer.source, why)
        self._forget(peer)
        peer.sock.close()

    def _forget(self, peer: _Unproven) -> None:
        del self._unproven[peer.sock]
        self._silent.remove(peer)
        self._speaking.remove(peer)
        if peer.watched:
            self._selector.unregister(peer.sock)


class AcceptingThread:
    """Thread that runs an acceptor and calls `admit` with each admitted connection.

    `admit` owns the connection, which is blocking again, and must not wait; its `ValueError` or `FarandoleError`
    refuses the peer."""

    def __init__(self, acceptor: Acceptor, admit: Callable[[Admitted], None], *, name: str) -> None:
        self._acceptor, self._admit = acceptor, admit
        self._dropped: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def drop(self, listener: socket.socket) -> None:
        """Close one of the listeners soon; any thread may call this."""
        self._dropped.put(listener)
        with contextlib.suppress(OSError):  # the thread has ended, and closed all listeners
            self._stop.send(b"d")

    def close(self) -> None:
        """End the thread and close the listeners; idempotent."""
        with contextlib.suppress(OSError):  # it is closed already
            self._stop.send(b"x")
        self._thread.join()
        self._stop.close()

    def _run(self) -> None:
        try:
            with self._stopped, selectors.DefaultSelector() as selector:
                selector.register(self._stopped, selectors.EVENT_READ)
                selector.register(self._acceptor, selectors.EVENT_READ)
                while self._serve_requests(
                    [key.fileobj for key, _ in selector.select(self._acceptor.seconds_to_wait())]
                ):
                    for admitted in self._acceptor.poll():
                        self._hand_over(admitted)
        except Exception:
            log.exception("%s has failed", self._thread.name)
        finally:
            self._acceptor.close()

    def _serve_requests(self, ready: Sequence[object]) -> bool:
        """Run the requests of other threads; return False if this thread must end."""
        if self._stopped not in ready:
            return True
        with contextlib.suppress(queue.Empty):
            while True:
                self._acceptor.drop(self._dropped.get_nowait())
        return b"x" not in self._stopped.recv(4096)

    def _hand_over(self, admitted: Admitted) -> None:
        admitted.sock.setblocking(True)
        try:
            self._admit(admitted)
        except (FarandoleError, ValueError) as error:
            self._acceptor.refuse(admitted, str(error))


def same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a local connection belongs to this process's user."""
    return _credentials(connection)[1] == os.geteuid()


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the other end of a local connection."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(found)
    return process, user, group
