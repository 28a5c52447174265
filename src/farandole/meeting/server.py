"""Rendezvous server, in the launcher or in the process of rank 0: one thread for any number of ranks and strangers."""

import contextlib
import functools
import ipaddress
import itertools
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.closing import Closing
from farandole.errors import ConfigError, FarandoleError, RendezvousError
from farandole.limits import require_open_files
from farandole.meeting.acceptor import Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address
from farandole.meeting.frames import HEAD, Steps, decode, frame, frame_steps
from farandole.meeting.handshake import LEAST_SECRET
from farandole.meeting.rounds import Caller, Meeting, RoundResult, encode_result

log = logging.getLogger(__name__)

MAX_PAYLOAD = 1 << 20
LONGEST_WAIT = 7 * 24 * 3600.0
SPEAK_SECONDS = 10.0  # for a caller to send its request, and again to read its answer
REJOIN_SECONDS = 2.0  # for a restarted rank to return, after the connection of a waiting rank has ended
GOODBYE = b"."  # sent by a rank that stayed connected, before it ends the connection on purpose


@dataclass(frozen=True, slots=True)
class Request:
    """A rank's part of an all-gather."""

    seconds: float  # for which it waits for the other ranks
    stays: bool  # connected after the answer
    payload: bytes


def result_limit(size: int) -> int:
    """Return the size of the largest result for `size` ranks."""
    return HEAD + size * (MAX_PAYLOAD + 16)


class _Caller:
    """One member's connection: its request, its answer, and whether it stays connected after that."""

    def __init__(self, admitted: Admitted, ticket: int) -> None:
        self.sock, self.where, self.ticket = admitted.sock, admitted.where, ticket
        self.deadline = time.monotonic() + SPEAK_SECONDS
        self.inbox = bytearray()
        self.outbox = memoryview(b"")  # of an answer, which the ranks of a round share
        self.wanted = 0
        self.hang_up = False  # close the connection when the outbox is empty
        self.waits = False  # for the other ranks, and sends nothing
        self.answered = False
        self.who: Caller | None = None
        self.stays = False  # connected after the answer; the end of the connection without GOODBYE then means its death
        self.steps = self._conversation(admitted.who)

    def _conversation(self, identity: bytes) -> Steps[tuple[float, bytes]]:
        self.who = decode(identity, Caller)
        request = decode((yield from frame_steps(MAX_PAYLOAD + HEAD, self.where)), Request)
        if len(request.payload) > MAX_PAYLOAD or not 0 <= request.seconds <= LONGEST_WAIT:
            what = f"{len(request.payload)} bytes, {request.seconds} s"
            raise ValueError(f"rank {self.who.rank} sent an invalid request ({what})")
        self.stays = request.stays
        return request.seconds, request.payload


class RendezvousServer(Closing):
    """Server that collects `size` payloads per round and answers all ranks, on its own thread until it is closed.

    It reads only the handshake of a connection until the peer has proved that it knows `secret`, and each state of a
    connection has a time limit. It watches ranks that stay connected after their answer, and reports a death to the
    others that stay. Listens on `host`, on a free port by default, and on `others`, further addresses of this machine,
    on free ports; `addresses` has them all. `generation` is the first one: departures are those of its ranks."""

    def __init__(
        self,
        size: int,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        others: Sequence[str] = (),
        generation: int = 0,
    ) -> None:
        if size < 1:
            raise ConfigError("size", f"must be >= 1, got {size}")
        if len(secret) < LEAST_SECRET:
            raise ConfigError("secret", f"must be at least {LEAST_SECRET} bytes long, got {len(secret)}")
        # Every waiting rank holds a connection.
        require_open_files(size, f"{size} ranks", functools.partial(ConfigError, "size"))
        self._meeting = Meeting(size, generation)
        self._tickets = itertools.count()
        self._callers: dict[int, _Caller] = {}
        self._lifelines: dict[int, _Caller] = {}  # connections of ranks that stay connected, by ticket
        self._deaths: list[Caller] = []  # of ranks that had their answer, or were about to get it
        self._absent: dict[tuple[int, int], float] = {}  # (generation, rank): the time until which it may return
        with contextlib.ExitStack() as undo:
            listeners = [undo.enter_context(_listen(host, port))]
            listeners += [undo.enter_context(_listen(other, 0)) for other in others]
            undo.pop_all()  # the acceptor closes them
        self.addresses = [join_address(*listener.getsockname()[:2]) for listener in listeners]
        self.address = self.addresses[0]
        service = f"the rendezvous at {self.address}"
        self._acceptor = Acceptor(listeners, secret, me=b"rendezvous", service=service, members=size)
        self._departures: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()  # None stops the server
        self._wakeup, self._wakeup_in = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._acceptor, selectors.EVENT_READ, self._acceptor)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup)
        self._thread = threading.Thread(target=self._run, name="farandole-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and end all connections; waiting ranks get a `RendezvousError`."""
        self._post(None)
        self._thread.join()
        self._wakeup_in.close()

    def depart(self, rank: int, reason: str) -> None:
        """Fail all rounds that wait for `rank`, now and until a newer generation begins; any thread may call this.

        Does nothing once the server is closed."""
        self._post((rank, reason))

    def _post(self, departure: tuple[int, str] | None) -> None:
        self._departures.put(departure)
        # The pair of sockets may be closed already.
        with contextlib.suppress(OSError):
            self._wakeup_in.send(b"x")

    def _run(self) -> None:
        try:
            while not self._handle_events():
                pass
        except Exception:
            log.exception("the rendezvous at %s has failed", self.address)
        finally:
            # Waiting ranks see the end of their connections.
            for caller in [*self._callers.values(), *self._lifelines.values()]:
                caller.sock.close()
            self._acceptor.close()
            self._wakeup.close()
            self._selector.close()

    def _handle_events(self) -> bool:
        """Wait for events and handle them; return True if the server must stop."""
        for key, _ in self._selector.select(self._seconds_to_wait()):
            if key.data is self._wakeup:
                if self._note_departures():
                    return True
                continue
            if key.data is self._acceptor:
                continue
            if key.data.ticket in self._callers:
                self._serve(key.data)
            elif key.data.ticket in self._lifelines:
                self._read_lifeline(key.data)
        for admitted in self._acceptor.poll():
            self._begin(admitted)
        now = time.monotonic()
        self._answer(self._meeting.expire(now))
        for generation, rank in [each for each, until in self._absent.items() if until <= now]:
            del self._absent[generation, rank]
            if generation == self._meeting.generation:
                self._answer(self._meeting.depart(rank, f"rank {rank} has ended while it waited for the others"))
        for caller in [each for each in self._callers.values() if each.deadline <= now]:
            self._refuse(caller, "it was too slow")
        return False

    def _note_departures(self) -> bool:
        """Note departed ranks; return True if the server must stop."""
        self._wakeup.recv(4096)
        with contextlib.suppress(queue.Empty):
            while (departure := self._departures.get_nowait()) is not None:
                self._answer(self._meeting.depart(*departure))
            return True
        return False

    def _seconds_to_wait(self) -> float | None:
        ends = [caller.deadline for caller in self._callers.values()]
        rounds = self._meeting.next_deadline()
        if rounds is not None:
            ends.append(rounds)
        ends += self._absent.values()
        strangers = self._acceptor.seconds_to_wait()
        if strangers is not None:
            ends.append(time.monotonic() + strangers)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _begin(self, admitted: Admitted) -> None:
        caller = _Caller(admitted, next(self._tickets))
        self._callers[caller.ticket] = caller
        self._selector.register(caller.sock, selectors.EVENT_READ, caller)
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
        if not more and not caller.inbox and not caller.waits:
            self._forget(caller)  # a rank that only tested whether it reaches this address
            return
        if not more or caller.waits:
            self._refuse(caller, "it hung up" if not more else "it sent data while it waited")
            return
        caller.inbox += more
        if len(caller.inbox) == caller.wanted:
            data = bytes(caller.inbox)
            caller.inbox.clear()
            self._advance(caller, data)

    def _advance(self, caller: _Caller, data: bytes | None) -> None:
        """Continue the conversation with `data` (None: begin it) until it needs more input."""
        try:
            wanted = next(caller.steps) if data is None else caller.steps.send(data)
            assert isinstance(wanted, int)  # `_answer` sends the answer later
            caller.wanted = wanted
        except StopIteration as done:
            self._arrive(caller, *done.value)
        except (FarandoleError, ValueError) as error:
            self._refuse(caller, str(error))

    def _arrive(self, caller: _Caller, seconds: float, payload: bytes) -> None:
        assert caller.who is not None
        now = time.monotonic()
        caller.waits, caller.deadline = True, float("inf")  # from here on the meeting's deadline holds
        self._absent.pop((caller.who.generation, caller.who.rank), None)
        self._answer(self._meeting.arrive(caller.ticket, caller.who, payload, now=now, deadline=now + seconds))

    def _answer(self, answers: dict[int, RoundResult]) -> None:
        written: dict[int, bytes] = {}  # ranks of one round share one answer, so encode it once
        for ticket, answer in answers.items():
            caller = self._callers[ticket]
            if id(answer) not in written:
                written[id(answer)] = frame(encode_result(answer))
            caller.outbox = memoryview(written[id(answer)])
            caller.stays = caller.stays and not isinstance(answer, RendezvousError)
            caller.answered, caller.hang_up = True, not caller.stays
            caller.deadline = time.monotonic() + SPEAK_SECONDS
            self._flush(caller)

    def _read_lifeline(self, lifeline: _Caller) -> None:
        """Read the goodbye of a rank that stayed connected, or else report its death to the others."""
        try:
            received = lifeline.sock.recv(1)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self._close_lifeline(lifeline)
        if received != GOODBYE:
            assert lifeline.who is not None
            self._report_death(lifeline.who)

    def _report_death(self, lost: Caller) -> None:
        """Report the death of `lost` to ranks that stay connected, now or after their answer, and to later callers."""
        self._deaths.append(lost)
        for lifeline in self._lifelines.values():
            self._send_death(lifeline, lost)
        if lost.generation == self._meeting.generation:
            self._answer(self._meeting.depart(lost.rank, _death_of(lost)))

    def _send_death(self, lifeline: _Caller, lost: Caller) -> None:
        """Report the death of `lost` to one rank that stays connected, if it is of the same generation."""
        if lifeline.who is not None and lifeline.who.generation == lost.generation:
            report = encode_result(RendezvousError(_death_of(lost), missing=(lost.rank,)))
            # The kernel has room for these few hundred bytes, unless the rank does not read at all.
            with contextlib.suppress(OSError):
                lifeline.sock.send(frame(report))

    def _close_lifeline(self, lifeline: _Caller) -> None:
        del self._lifelines[lifeline.ticket]
        self._selector.unregister(lifeline.sock)
        lifeline.sock.close()

    def _flush(self, caller: _Caller) -> None:
        try:
            while caller.outbox:
                caller.outbox = caller.outbox[caller.sock.send(caller.outbox) :]
        except BlockingIOError:
            self._selector.modify(caller.sock, selectors.EVENT_WRITE, caller)
            return
        except OSError as error:
            self._refuse(caller, str(error))
            return
        if caller.hang_up:
            self._forget(caller)
            return
        if caller.answered:
            self._lifelines[caller.ticket] = self._callers.pop(caller.ticket)
            for lost in self._deaths:
                self._send_death(caller, lost)
        self._selector.modify(caller.sock, selectors.EVENT_READ, caller)

    def _refuse(self, caller: _Caller, why: str) -> None:
        log.warning("the rendezvous at %s ended its connection with %s: %s", self.address, caller.where, why)
        self._forget(caller)
        self._answer(self._meeting.leave(caller.ticket))
        if caller.who is None:
            return
        if caller.answered and caller.stays:
            self._report_death(caller.who)
        elif caller.waits and not caller.answered:
            self._absent[caller.who.generation, caller.who.rank] = time.monotonic() + REJOIN_SECONDS

    def _forget(self, caller: _Caller) -> None:
        if self._callers.pop(caller.ticket, None) is not None:
            self._selector.unregister(caller.sock)
            caller.sock.close()


def _listen(host: str, port: int) -> socket.socket:
    if _is_wildcard(host):
        raise ConfigError("host", f"{host} is no address that ranks can connect to; name one interface's address")
    return listen(host, port)


def _death_of(lost: Caller) -> str:
    return f"rank {lost.rank} has ended while the ranks connected"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""  # a name; an empty one means all interfaces
