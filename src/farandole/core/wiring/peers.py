"""Authenticated connections between the ranks of a starting job, each dialed or accepted for one purpose."""

import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from farandole.errors import AuthenticationError, RendezvousError
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline
from farandole.meeting.rendezvous import Rendezvous

LOOK_AGAIN = 0.05  # seconds between two checks of a deadline that may end early
MISSED = "missed"  # purpose of a connection that reports a missing rank, whose number follows
REPORT_LIMIT = timedelta(seconds=2)  # for sending all reports
REPORT_WAIT = 0.5  # seconds to wait for the report of a rank that no longer listens


@contextmanager
def reaching(peer: int, where: str = "") -> Iterator[None]:
    """Turn failures to connect to `peer` into a `RendezvousError` that names it."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise RendezvousError(f"rank {peer} cannot be reached{where}: {error}", missing=(peer,)) from error


def connect_to(
    address: bytes | str, rendezvous: Rendezvous, purpose: str, peer: int, deadline: Deadline
) -> socket.socket:
    """Connect to rank `peer` for `purpose`; `address` is "host:port", or the name of a Unix socket.

    Blocks up to `deadline`. Raises `OSError`, or `AuthenticationError` if another rank or a stranger answers."""
    me = f"{rendezvous.rank} {purpose} {rendezvous.generation}".encode()
    sock, who = dial(address, rendezvous.secret, me=me, deadline=deadline)
    if who != str(peer).encode():
        sock.close()
        raise AuthenticationError(f"it is {who.decode(errors='replace')!r} where rank {peer} was expected")
    return sock


def report_missing(missed: int, addresses: dict[int, str], rendezvous: Rendezvous) -> None:
    """Report to the ranks at `addresses` that this rank gives up because rank `missed` did not connect.

    Blocks for at most two seconds."""
    deadline = Deadline(REPORT_LIMIT)
    for peer, address in addresses.items():
        # A rank that no longer listens has connected all its peers, or has given up too.
        with suppress(OSError, EOFError, AuthenticationError):
            connect_to(address, rendezvous, f"{MISSED}{missed}", peer, deadline).close()


class Arrivals:
    """Connections of peers to this rank, accepted and authenticated by a thread from construction to `close`.

    With the thread, strangers cannot delay `take`. `lose` ends all waits; any thread can call it when a rank has died.
    A peer's report of a missing rank ends them too."""

    def __init__(self, listeners: Collection[socket.socket], rendezvous: Rendezvous) -> None:
        self._generation = rendezvous.generation
        self._arrived: dict[tuple[int, str], socket.socket] = {}
        self._lost: RendezvousError | None = None
        self._changed = threading.Condition()
        me = str(rendezvous.rank)
        acceptor = Acceptor(list(listeners), rendezvous.secret, me=me.encode(), service=f"rank {me}")
        self._thread = AcceptingThread(acceptor, self._admit, name="farandole-accept")

    def lose(self, error: RendezvousError) -> None:
        """End all waits, now and later, with `error`; only the first call counts."""
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()

    def require_none_lost(self) -> None:
        """Raise the error that `lose` was called with, if any."""
        if self._lost is not None:
            raise self._lost

    def take(self, expected: Collection[tuple[int, str]], deadline: Deadline) -> tuple[tuple[int, str], socket.socket]:
        """Return one of `expected`, which are pairs of a rank and a purpose, and its connection.

        Blocks until there is one, up to `deadline`; raises `RendezvousError` with the ranks that have not connected, or
        with the rank that has died."""
        while True:
            with self._changed:
                self.require_none_lost()
                arrived = next((each for each in self._arrived if each in expected), None)
                if arrived is not None:
                    return arrived, self._arrived.pop(arrived)
                try:
                    self._changed.wait(min(deadline.remaining(), LOOK_AGAIN))
                except TimeoutError as error:
                    missing = sorted({peer for peer, _ in expected})
                    raise RendezvousError("peers did not connect in time", missing=missing) from error

    def drop(self, listener: socket.socket) -> None:
        """Close a listener that expects no more peers."""
        self._thread.drop(listener)

    def reported_loss(self) -> RendezvousError | None:
        """Return the error that `lose` was called with, waiting a moment for one, to explain why a peer refuses."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, REPORT_WAIT)
            return self._lost

    def close(self) -> None:
        """End the thread and close connections that were not taken. Idempotent."""
        self._thread.close()
        with self._changed:
            for sock in self._arrived.values():
                sock.close()
            self._arrived.clear()

    def _admit(self, peer: Admitted) -> None:
        rank, purpose, generation = peer.who.decode().split(" ")
        if int(generation) != self._generation:
            raise ValueError(f"it belongs to generation {generation}, this rank to {self._generation}")
        if purpose.startswith(MISSED):
            peer.sock.close()
            missed = (int(purpose.removeprefix(MISSED)),)
            self.lose(RendezvousError(f"rank {rank} could not connect to all ranks", missing=missed))
            return
        with self._changed:
            # A peer connects again if its first connection broke before it received the last answer.
            earlier = self._arrived.pop((int(rank), purpose), None)
            if earlier is not None:
                earlier.close()
            self._arrived[int(rank), purpose] = peer.sock
            self._changed.notify_all()
