"""Connections between the ranks of a job while they start: dialed or accepted, authenticated, each for one purpose."""

import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from farandole.acceptor import AcceptingThread, Acceptor, Admitted
from farandole.dialer import dial
from farandole.errors import AuthenticationError, RendezvousError
from farandole.handshake import Deadline
from farandole.rendezvous import Rendezvous

__all__ = ["Arrivals", "connect_to", "reaching", "report_missing"]

LOOK_AGAIN = 0.05  # seconds between two looks at a deadline that may end early
MISSED = "missed"  # the purpose of a rank that reports that it has given up; the rank that it misses follows
REPORT_LIMIT = timedelta(seconds=2)  # for all reports
REPORT_WAIT = 0.5  # seconds in which a rank that no longer listens reports why


@contextmanager
def reaching(peer: int, where: str = "") -> Iterator[None]:
    """Turn what goes wrong on the way to `peer` into a `RendezvousError` that names it."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise RendezvousError(f"rank {peer} cannot be reached{where}: {error}", missing=(peer,)) from error


def connect_to(
    address: bytes | str, rendezvous: Rendezvous, purpose: str, peer: int, deadline: Deadline
) -> socket.socket:
    """Connect to rank `peer` for `purpose`; `address` is "host:port", or a Unix socket's name.

    Blocks up to `deadline`. Raises `OSError`, or `AuthenticationError` when it is not this peer."""
    me = f"{rendezvous.rank} {purpose} {rendezvous.generation}".encode()
    sock, who = dial(address, rendezvous.secret, me=me, deadline=deadline)
    if who != str(peer).encode():
        sock.close()
        raise AuthenticationError(f"it is {who.decode(errors='replace')!r} where rank {peer} was expected")
    return sock


def report_missing(missed: int, addresses: dict[int, str], rendezvous: Rendezvous) -> None:
    """Report to the ranks at `addresses` that this one gives up because rank `missed` did not connect.

    Blocks for two seconds at most."""
    deadline = Deadline(REPORT_LIMIT)
    for peer, address in addresses.items():
        # A rank that listens no longer is connected, or has given up too.
        with suppress(OSError, EOFError, AuthenticationError):
            connect_to(address, rendezvous, f"{MISSED}{missed}", peer, deadline).close()


class Arrivals:
    """The peers that have connected to this rank, which accepts them from the making of this object to `close`.

    A thread accepts and authenticates, so that strangers delay no wait here. `lose` ends all waits: from any thread,
    when a rank is known to have died. A peer that reports a missing rank does so too."""

    def __init__(self, listeners: Collection[socket.socket], rendezvous: Rendezvous) -> None:
        self._generation = rendezvous.generation
        self._arrived: dict[tuple[int, str], socket.socket] = {}
        self._lost: RendezvousError | None = None
        self._changed = threading.Condition()
        me = str(rendezvous.rank)
        acceptor = Acceptor(list(listeners), rendezvous.secret, me=me.encode(), service=f"rank {me}")
        self._thread = AcceptingThread(acceptor, self._admit, name="farandole-accept")

    def lose(self, error: RendezvousError) -> None:
        """Let all waits, now and later, end with `error`, unless another one came first."""
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()

    def require_none_lost(self) -> None:
        """Raise what `lose` was given, if anything."""
        if self._lost is not None:
            raise self._lost

    def take(self, expected: Collection[tuple[int, str]], deadline: Deadline) -> tuple[tuple[int, str], socket.socket]:
        """Wait for one of `expected`, pairs of a rank and a purpose, and hand over its connection.

        Blocks up to `deadline`; raises `RendezvousError` naming who has not come, or who has died."""
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
        """Close a listener at which no peer is expected any more."""
        self._thread.drop(listener)

    def reported_loss(self) -> RendezvousError | None:
        """Return what `lose` was given, or is given within a moment: it explains why a peer listens no longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, REPORT_WAIT)
            return self._lost

    def close(self) -> None:
        """Stop accepting and close connections that were not taken; idempotent."""
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
            # A peer comes twice when its first connection broke before the answer that admits it came.
            earlier = self._arrived.pop((int(rank), purpose), None)
            if earlier is not None:
                earlier.close()
            self._arrived[int(rank), purpose] = peer.sock
            self._changed.notify_all()
