"""The launcher's side of the rendezvous: one thread, however many ranks and strangers connect."""

import contextlib
import ipaddress
import itertools
import logging
import queue
import resource
import selectors
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Self

from farandole.errors import ConfigError, FarandoleError, RendezvousError
from farandole.handshake import FRAME_LENGTH, LEAST_SECRET, Steps, handshake_steps, join_address, peer_name
from farandole.meeting import Answer, Caller, Meeting, write_answer

__all__ = ["MAX_PAYLOAD", "REQUEST", "RendezvousServer", "answer_limit"]

log = logging.getLogger(__name__)

MAX_PAYLOAD = 1 << 20
REQUEST = struct.Struct("!dI")  # seconds that the caller waits, bytes of its payload
LONGEST_WAIT = 7 * 24 * 3600.0
SPEAK_SECONDS = 10.0  # for the handshake, and again for the request, and again for taking the answer
# A rank proves itself in milliseconds; strangers who say nothing are dropped, oldest first, when there are more.
MOST_STRANGERS = 256


def answer_limit(size: int) -> int:
    """The largest answer that `size` ranks can have."""
    return 64 + size * (MAX_PAYLOAD + 8)


class _Caller:
    """One connection: what it is about to say, what it is still to be told."""

    def __init__(self, sock: socket.socket, ticket: int, secret: bytes) -> None:
        self.sock, self.ticket = sock, ticket
        self.where = peer_name(sock)
        self.trusted = False
        self.deadline = time.monotonic() + SPEAK_SECONDS
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.wanted = 0
        self.hang_up = False  # when the outbox is empty
        self.waits = False  # for the other ranks: nothing more is to be read
        self.steps = self._conversation(secret)

    def _conversation(self, secret: bytes) -> Steps[tuple[Caller, float, bytes]]:
        who = yield from handshake_steps(secret, me=b"rendezvous", accept=True, where=self.where)
        self.trusted = True
        self.deadline = time.monotonic() + SPEAK_SECONDS
        caller = Caller.unpack(who)
        seconds, length = REQUEST.unpack((yield REQUEST.size))
        if length > MAX_PAYLOAD or not 0 <= seconds <= LONGEST_WAIT:
            raise RendezvousError(f"rank {caller.rank} sent a request that cannot be ({length} bytes, {seconds} s)")
        payload = (yield length) if length else b""
        return caller, seconds, payload


class RendezvousServer:
    """Collects `size` payloads per round and answers all ranks; runs a thread of its own until closed.

    A connection is read no further than the handshake until it has proved that it knows `secret`, and each state
    that it can be in has an end. Listens on `host` alone, and on a free port by default."""

    def __init__(self, size: int, secret: bytes, *, host: str = "127.0.0.1", port: int = 0) -> None:
        if size < 1:
            raise ConfigError("size", f"must be >= 1, got {size}")
        if len(secret) < LEAST_SECRET:
            raise ConfigError("secret", f"must be at least {LEAST_SECRET} bytes long, got {len(secret)}")
        # Every rank that waits holds a connection; this process has other files open too.
        most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], size + 64
        if 0 <= most < needed:
            problem = f"{size} ranks need {needed} open files in this process, which may have {most}; raise ulimit -n"
            raise ConfigError("size", problem)
        self._meeting = Meeting(size)
        self._secret = secret
        self._tickets = itertools.count()
        self._callers: dict[int, _Caller] = {}
        self._listener = _listen(host, port)
        bound = self._listener.getsockname()
        self.address = join_address(bound[0], bound[1])
        self._departures: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()  # None: the server is to stop
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        self._selector.register(self._bell, selectors.EVENT_READ, self._bell)
        self._thread = threading.Thread(target=self._run, name="farandole-rendezvous", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and end all connections; ranks that still wait get a `RendezvousError`."""
        self._pull(None)
        self._thread.join()
        self._rope.close()

    def depart(self, rank: int, reason: str) -> None:
        """Let all who wait for `rank`, now or later, hear at once that it will not come; from any thread.

        It holds until a newer generation begins; does nothing once the server is closed."""
        self._pull((rank, reason))

    def _pull(self, departure: tuple[int, str] | None) -> None:
        self._departures.put(departure)
        # A pair of sockets that is already closed has done its work.
        with contextlib.suppress(OSError):
            self._rope.send(b"x")

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
        except Exception:
            log.exception("the rendezvous at %s has failed", self.address)
        finally:
            # Ranks that wait read the end of their connections: nobody waits for a server that is gone.
            for caller in self._callers.values():
                caller.sock.close()
            self._listener.close()
            self._bell.close()
            self._selector.close()

    def _turn(self) -> bool:
        """Wait for one thing to happen and do it; True when the server is to stop."""
        for key, _ in self._selector.select(self._patience()):
            if key.data is self._bell:
                if self._bell_rings():
                    return True
                continue
            if key.data is self._listener:
                self._accept()
            elif key.data.ticket in self._callers:
                self._serve(key.data)
        now = time.monotonic()
        self._tell(self._meeting.expire(now))
        for caller in [each for each in self._callers.values() if each.deadline <= now]:
            self._refuse(caller, "it was too slow")
        return False

    def _bell_rings(self) -> bool:
        """Note who has departed; True when the server is to stop."""
        self._bell.recv(4096)
        with contextlib.suppress(queue.Empty):
            while (departure := self._departures.get_nowait()) is not None:
                self._tell(self._meeting.depart(*departure))
            return True
        return False

    def _patience(self) -> float | None:
        ends = [caller.deadline for caller in self._callers.values()]
        rounds = self._meeting.next_deadline()
        if rounds is not None:
            ends.append(rounds)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self) -> None:
        strangers = [caller for caller in self._callers.values() if not caller.trusted]
        if len(strangers) >= MOST_STRANGERS:
            self._refuse(strangers[0], "there are too many that say nothing")
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of file descriptors, mostly. The listener stays readable: give one back, or this would spin.
            log.warning("cannot accept a connection: %s", error)
            if strangers:
                self._refuse(strangers[0], "this process is out of resources")
            else:
                time.sleep(0.05)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = _Caller(sock, next(self._tickets), self._secret)
        self._callers[caller.ticket] = caller
        self._selector.register(sock, selectors.EVENT_READ, caller)
        self._advance(caller, None)

    def _serve(self, caller: _Caller) -> None:
        try:
            if caller.outbox:
                self._flush(caller)
                return
            more = caller.sock.recv(max(1, caller.wanted - len(caller.inbox)))
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(caller, str(error))
            return
        if not more or caller.waits:
            self._refuse(caller, "it hung up" if not more else "it spoke out of turn")
            return
        caller.inbox += more
        if len(caller.inbox) == caller.wanted:
            heard = bytes(caller.inbox)
            caller.inbox.clear()
            self._advance(caller, heard)

    def _advance(self, caller: _Caller, heard: bytes | None) -> None:
        """Go on with the conversation after `heard` (None: begin it) until it wants to hear more."""
        try:
            wish = next(caller.steps) if heard is None else caller.steps.send(heard)
            while isinstance(wish, bytes):
                caller.outbox += wish
                wish = next(caller.steps)
            caller.wanted = wish
        except StopIteration as done:
            self._arrive(caller, *done.value)
            return
        except FarandoleError as error:
            self._refuse(caller, str(error))
            return
        self._flush(caller)

    def _arrive(self, caller: _Caller, who: Caller, seconds: float, payload: bytes) -> None:
        now = time.monotonic()
        caller.waits, caller.deadline = True, float("inf")  # the meeting's deadline holds from here on
        self._tell(self._meeting.arrive(caller.ticket, who, payload, now=now, deadline=now + seconds))

    def _tell(self, answers: dict[int, Answer]) -> None:
        written: dict[int, bytes] = {}  # ranks of one round share one answer: write it once
        for ticket, answer in answers.items():
            caller = self._callers[ticket]
            frame = written.setdefault(id(answer), b"") or write_answer(answer)
            written[id(answer)] = frame
            caller.outbox += FRAME_LENGTH.pack(len(frame)) + frame
            caller.hang_up, caller.deadline = True, time.monotonic() + SPEAK_SECONDS
            self._flush(caller)

    def _flush(self, caller: _Caller) -> None:
        try:
            while caller.outbox:
                del caller.outbox[: caller.sock.send(caller.outbox)]
        except BlockingIOError:
            self._selector.modify(caller.sock, selectors.EVENT_WRITE, caller)
            return
        except OSError as error:
            self._refuse(caller, str(error))
            return
        if caller.hang_up:
            self._forget(caller)
        else:
            self._selector.modify(caller.sock, selectors.EVENT_READ, caller)

    def _refuse(self, caller: _Caller, why: str) -> None:
        log.warning("the rendezvous at %s ended its connection with %s: %s", self.address, caller.where, why)
        self._forget(caller)
        self._tell(self._meeting.leave(caller.ticket))

    def _forget(self, caller: _Caller) -> None:
        if self._callers.pop(caller.ticket, None) is not None:
            self._selector.unregister(caller.sock)
            caller.sock.close()


def _listen(host: str, port: int) -> socket.socket:
    if _is_wildcard(host):
        raise ConfigError("host", f"{host} is no address that ranks can connect to; name one interface's address")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=4096)
    listener.setblocking(False)
    return listener


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""  # a name; the empty one means all interfaces
