"""Measurement of the network between each pair of hosts, by a rank on each: connection, latency, clocks, bandwidth."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from farandole.errors import AuthenticationError
from farandole.launch.doctor.facts import Fact, examine
from farandole.launch.hosts import route_to
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, recv_exactly
from farandole.meeting.rendezvous import Rendezvous, from_environment

REACH = timedelta(seconds=10)  # for a connection, and its handshake
PAIR = timedelta(seconds=60)  # for all measurements of a pair
ALL = timedelta(minutes=30)
PINGS = 20
FIRST = 1 << 20  # bytes of the transfer that shows how long the next one may be
LARGEST = 1 << 30
SECONDS = 0.3  # of the transfer that counts
_LENGTH, _TIME = struct.Struct("!cQ"), struct.Struct("!d")
_PING, _TAKE, _GIVE = b"p", b"t", b"g"


@dataclass(frozen=True, slots=True)
class Link:
    """The network between two hosts, given by their numbers, or the problem with it."""

    there: int
    here: int
    problem: str = ""
    latency: float = 0.0  # seconds for a short message and its answer
    clock: float = 0.0  # seconds that the other's clock is ahead
    out: float = 0.0  # bytes per second
    back: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """One host's facts, and the links that it has measured."""

    facts: list[Fact]
    links: list[Link]


def examine_host(load: bool = True) -> Report:
    """Examine this rank's host and its links to the other hosts. Blocks until the ranks of all hosts have done so."""
    rendezvous = from_environment()
    facts = examine(load)
    assert rendezvous.address is not None
    own = route_to(*split_address(rendezvous.address))
    listener = listen(own)
    address = join_address(*listener.getsockname()[:2])
    acceptor = Acceptor([listener], rendezvous.secret, me=str(rendezvous.rank).encode(), service="the examination")
    thread = AcceptingThread(acceptor, _serve_on_thread, name="farandole-accept")
    try:
        cards = rendezvous.allgather(json.dumps(address).encode(), timeout=ALL)
        links = list(_measure_all(rendezvous, [json.loads(card) for card in cards]))
    finally:
        thread.close()
    return Report(facts, links)


def rounds_of(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of `count` hosts in rounds, in each of which a host is in at most one pair.

    The higher number of a pair comes first."""
    places = [*range(count), *([-1] if count % 2 else [])]  # -1 stands for a host that rests
    rounds = []
    for _ in range(len(places) - 1):
        pairs = zip(places, reversed(places), strict=True)
        rounds.append([(max(pair), min(pair)) for pair in list(pairs)[: len(places) // 2] if min(pair) >= 0])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _measure_all(rendezvous: Rendezvous, addresses: list[str]) -> Iterator[Link]:
    for pairs in rounds_of(rendezvous.size):
        for here, there in pairs:
            if here == rendezvous.rank:
                yield _measure(rendezvous, there, addresses[there])
        rendezvous.allgather(b"", timeout=ALL)  # no two measurements of a host overlap


def _measure(rendezvous: Rendezvous, there: int, address: str) -> Link:
    here = rendezvous.rank
    try:
        sock, _ = dial(address, rendezvous.secret, me=str(here).encode(), deadline=Deadline(REACH))
        with sock:
            return _measure_on(sock, Deadline(PAIR), here, there)
    except (OSError, EOFError, AuthenticationError) as error:
        return Link(there, here, problem=f"nothing passes to {address}: {error}")


def _measure_on(sock: socket.socket, deadline: Deadline, here: int, there: int) -> Link:
    sock.settimeout(deadline.remaining())
    latency, clock = min(_ping(sock, deadline) for _ in range(PINGS))
    rates = []
    for kind in (_TAKE, _GIVE):
        first = _transfer(sock, kind, FIRST, deadline)
        size = max(FIRST, min(LARGEST, int(FIRST / first * SECONDS)))
        rates.append(size / _transfer(sock, kind, size, deadline))
    return Link(there, here, latency=latency, clock=clock, out=rates[0], back=rates[1])


def _ping(sock: socket.socket, deadline: Deadline) -> tuple[float, float]:
    """Return the seconds until the answer, and by how much the other's clock is ahead."""
    sent, begin = time.time(), time.perf_counter()
    sock.sendall(_LENGTH.pack(_PING, 0))
    (their,) = _TIME.unpack(recv_exactly(sock, _TIME.size, deadline))
    took = time.perf_counter() - begin
    return took, their - (sent + took / 2)


def _transfer(sock: socket.socket, kind: bytes, size: int, deadline: Deadline) -> float:
    """Send or receive `size` bytes; return the seconds until all have arrived."""
    begin = time.perf_counter()
    sock.sendall(_LENGTH.pack(kind, size))
    if kind == _TAKE:
        _send(sock, size)
        recv_exactly(sock, 1, deadline)
    else:
        _discard(sock, size)
    return time.perf_counter() - begin


def _serve_on_thread(peer: Admitted) -> None:
    threading.Thread(target=_serve, args=(peer.sock,), name="farandole-examine", daemon=True).start()


def _serve(sock: socket.socket) -> None:
    """Serve the requests of the other host until it ends the connection."""
    deadline = Deadline(PAIR)
    with sock, suppress(OSError, EOFError):  # the other host reports it
        sock.settimeout(PAIR.total_seconds())
        while True:
            kind, size = _LENGTH.unpack(recv_exactly(sock, _LENGTH.size, deadline))
            if kind == _PING:
                sock.sendall(_TIME.pack(time.time()))
            elif kind == _TAKE:
                _discard(sock, size)
                sock.sendall(b"!")
            else:
                _send(sock, min(size, LARGEST))


def _send(sock: socket.socket, size: int) -> None:
    block = memoryview(bytes(FIRST))
    while size:
        sock.sendall(block[: min(size, FIRST)])
        size -= min(size, FIRST)


def _discard(sock: socket.socket, size: int) -> None:
    buffer = bytearray(FIRST)
    with memoryview(buffer) as view:
        while size:
            count = sock.recv_into(view[: min(size, FIRST)])
            if count == 0:
                raise EOFError("the connection ended")
            size -= count
