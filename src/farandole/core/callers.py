"""Between ranks that connect: who calls whom, proves who it is, says what for, and says so when it gives up."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from farandole.errors import AuthenticationError, RendezvousError
from farandole.handshake import Deadline, authenticate, split_address
from farandole.rendezvous import Rendezvous

__all__ = ["Reception", "call", "reaching", "tell_missed"]

HANDSHAKE_TIMEOUT = timedelta(seconds=10)
LOOK_AGAIN = 0.05  # seconds
MISSED = "missed"  # what a caller says who has given up; the number of the rank that it missed follows
TELLING = timedelta(seconds=2)  # for all that are to hear of it
HEARSAY = 0.5  # seconds, for news that explain why a rank does not listen any more


@contextmanager
def reaching(peer: int, where: str = "") -> Iterator[None]:
    """Give what goes wrong between this rank and `peer`, who has been there a moment ago, the peer's number."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise RendezvousError(f"rank {peer} cannot be reached{where}: {error}", missing=(peer,)) from error
    except AuthenticationError as error:
        if not isinstance(error.__cause__, OSError | EOFError):
            raise
        # It has not answered wrongly, it is gone.
        raise RendezvousError(f"rank {peer} cannot be reached{where}: {error.problem}", missing=(peer,)) from error


def call(address: bytes | str, rendezvous: Rendezvous, purpose: str, peer: int, deadline: Deadline) -> socket.socket:
    """Connect to `peer`, who is a member of this job as we are; `address` is "host:port", or a Unix socket's name.

    Blocks up to `deadline`. Raises `OSError`, or `AuthenticationError` when it is not this peer."""
    if isinstance(address, str):
        sock = socket.create_connection(split_address(address), timeout=deadline.remaining())
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if isinstance(address, str):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            sock.settimeout(deadline.remaining())
            sock.connect(address)
        me = f"{rendezvous.rank} {purpose} {rendezvous.generation}".encode()
        timeout = min(HANDSHAKE_TIMEOUT, timedelta(seconds=deadline.remaining()))
        who = authenticate(sock, rendezvous.secret, me=me, accept=False, timeout=timeout)
        if who != str(peer).encode():
            raise AuthenticationError(f"it is {who.decode(errors='replace')!r} where rank {peer} was expected")
    except BaseException:
        sock.close()
        raise
    return sock


def tell_missed(missed: int, addresses: dict[int, str], rendezvous: Rendezvous) -> None:
    """Tell the ranks at `addresses` that this one gives up, for want of rank `missed`; takes seconds at most."""
    deadline = Deadline(TELLING)
    for peer, address in addresses.items():
        # Who does not listen any more is connected, or has given up too.
        with suppress(OSError, EOFError, AuthenticationError):
            call(address, rendezvous, f"{MISSED}{missed}", peer, deadline).close()


class Reception:
    """Accepts callers until all of `expected` have come; strangers are turned away and delay nobody.

    `expected` holds pairs of a rank and a purpose; `welcome` is called with the connection of each, and closes nothing.
    A caller that has given up ends the wait. Who `calls` others meanwhile accepts, to hear of that, until it says that
    this is done."""

    def __init__(
        self,
        listener: socket.socket,
        rendezvous: Rendezvous,
        expected: Iterable[tuple[int, str]],
        welcome: Callable[[socket.socket, int, str], None],
        *,
        calls: bool = False,
    ) -> None:
        self._listener, self._rendezvous, self._welcome = listener, rendezvous, welcome
        self._expected, self._calls = set(expected), calls
        self._lock, self._over = threading.Lock(), threading.Event()
        self._missed: RendezvousError | None = None
        self._threads: list[threading.Thread] = []

    def run(self, deadline: Deadline) -> None:
        """Block until all have come, up to `deadline`; raises `RendezvousError` naming who has not.

        When a caller has given up, that is whom it has missed."""
        wanted = len(self._expected)
        self._end_if_all_is_done()
        try:
            while not self._over.is_set():
                # As many have come as were expected: most likely the last handshake is just under way.
                if len(self._threads) >= wanted and self._over.wait(LOOK_AGAIN):
                    break
                self._accept(min(deadline.remaining(), LOOK_AGAIN))
        except TimeoutError as error:
            # Else it is this rank's own calls that take so long, and they say so.
            if missing := sorted({peer for peer, _ in self._expected}):
                raise RendezvousError("peers did not connect in time", missing=missing) from error
        finally:
            self._join()
        if self._missed is not None:
            raise self._missed

    def hearsay(self) -> RendezvousError | None:
        """What a caller who has given up says within a moment; to be called instead of `run`, or after it has ended."""
        deadline = Deadline(timedelta(seconds=HEARSAY))
        with suppress(TimeoutError):
            while self._missed is None:
                self._accept(deadline.remaining())
        self._join()
        return self._missed

    def calls_are_done(self) -> None:
        """Let a `run` in another thread end once all have come."""
        self._calls = False
        self._end_if_all_is_done()

    def stop(self) -> None:
        """End a `run` in another thread."""
        self._over.set()

    def _accept(self, timeout: float) -> None:
        self._listener.settimeout(timeout)
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            return
        self._threads.append(threading.Thread(target=self._receive, args=(sock,), name="farandole-handshake"))
        self._threads[-1].start()

    def _receive(self, sock: socket.socket) -> None:
        with sock:
            try:
                me = str(self._rendezvous.rank).encode()
                who = authenticate(sock, self._rendezvous.secret, me=me, accept=True, timeout=HANDSHAKE_TIMEOUT)
            except AuthenticationError:
                return  # whoever it was has been refused; the expected peer is still awaited
            rank, purpose, generation = who.decode().split(" ")
            guest = (int(rank), purpose)
            with self._lock:
                if int(generation) != self._rendezvous.generation:
                    return
                if purpose.startswith(MISSED):
                    missed = (int(purpose.removeprefix(MISSED)),)
                    self._missed = RendezvousError(f"rank {rank} could not connect to all ranks", missing=missed)
                    self._over.set()
                elif guest in self._expected:
                    self._expected.discard(guest)
                    self._welcome(sock, *guest)
                    self._end_if_all_is_done()

    def _end_if_all_is_done(self) -> None:
        if not self._expected and not self._calls:
            self._over.set()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
