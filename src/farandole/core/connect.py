"""From a rendezvous to wired peers: who is where, one shared segment per host, sockets between hosts.

Every rank opens its listeners, tells all others where they are, and then connects: to the first rank of its host for
the descriptor of the shared segment, and to lower ranks of other hosts: to those that it exchanges data with
(`data_peers`) for a data socket, and to its parent in the tree of control connections for a control socket. Listeners
exist only while this lasts. No byte of a peer is used before the peer has proved the job's secret.
"""

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from farandole._native import Segment, data_peers, make_grid
from farandole.config import Config
from farandole.errors import AuthenticationError, RendezvousError
from farandole.handshake import Deadline, authenticate, join_address, split_address
from farandole.rendezvous import PartRendezvous, Rendezvous, ThreadRendezvous
from farandole.topology import Topology, host_identity, interface_address

__all__ = ["Wiring", "connect"]

HANDSHAKE_TIMEOUT = timedelta(seconds=10)
LOOK_AGAIN = 0.05  # seconds

# Among the ranks of one host, once they are connected: the rank that is missing, or that all is well.
WORD = struct.Struct("!i")
RUNS = -1
GRACE = timedelta(seconds=5)  # when its time is over, the first rank of a host tells the others whom it has missed


@dataclass
class Wiring:
    """What the native engine is built from; it takes over the descriptors of `remotes`.

    `companions` are connections from the first rank of this host to its other ranks, until `settle` or `abandon`."""

    topology: Topology
    segment: Segment
    deadline: Deadline
    remotes: list[tuple[int, int, int]] = field(default_factory=list)  # (peer, control fd or -1, data fd or -1)
    companions: dict[int, socket.socket] = field(default_factory=dict)

    def settle(self) -> None:
        """Say that this rank's engine runs, and wait until all of this host's do.

        From then on the shared segment shows who dies; who has died before is marked dead there, so that nobody waits
        for it. Raises `RendezvousError` naming who was missed here or by another rank of this host."""
        leads = self.topology.rank == self.topology.local_ranks[0]
        if not leads:
            self._tell(RUNS)
        for peer, sock in self.companions.items():
            said = self._hear(peer, sock, timedelta(0) if leads else GRACE)
            if said is None:
                self.segment.mark_dead(peer)
            elif said != RUNS:
                raise RendezvousError(f"rank {peer} could not connect to all ranks", missing=(said,))
        if leads:
            self._tell(RUNS)
        self._close()

    def abandon(self, error: BaseException) -> None:
        """Let the ranks of this host that wait for this one hear whom it has missed, or else that it is gone."""
        if isinstance(error, RendezvousError) and error.missing:
            self._tell(error.missing[0])
        self._close()

    def _tell(self, word: int) -> None:
        for sock in self.companions.values():
            with suppress(ConnectionError):  # it is gone; whoever listens to it hears that
                sock.sendall(WORD.pack(word))

    def _hear(self, peer: int, sock: socket.socket, grace: timedelta) -> int | None:
        """What `peer` says; None when it is gone."""
        try:
            sock.settimeout(self.deadline.remaining() + grace.total_seconds())
            said = sock.recv(WORD.size, socket.MSG_WAITALL)
        except TimeoutError as error:
            raise RendezvousError("a rank of this host did not start its engine in time", missing=(peer,)) from error
        except ConnectionError:
            return None
        return int(WORD.unpack(said)[0]) if len(said) == WORD.size else None

    def _close(self) -> None:
        for sock in self.companions.values():
            sock.close()


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others about itself."""

    host: str
    unix: str  # name in the abstract namespace: no file that could stay behind
    tcp: str  # host:port

    def pack(self) -> bytes:
        return json.dumps([self.host, self.unix, self.tcp]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> "_Card":
        return cls(*json.loads(payload))


class _Patience(Deadline):
    """A deadline that ends early, with an error, once waiting makes no sense any more."""

    def __init__(self, timeout: timedelta, require_alive: Callable[[], None] | None) -> None:
        super().__init__(timeout)
        self._require_alive = require_alive

    def remaining(self) -> float:
        """Seconds that are left; raises `TimeoutError` when none are, or why there is nothing to wait for."""
        if self._require_alive is not None:
            self._require_alive()
        return super().remaining()


def connect(
    rendezvous: Rendezvous,
    config: Config,
    *,
    host: str | None = None,
    require_alive: Callable[[], None] | None = None,
) -> Wiring:
    """Meet all ranks at `rendezvous` and connect to those that this rank talks to.

    `host` overrides this host's identity, so that tests can make several hosts of one. `require_alive` raises what is
    known, by other means, to have happened to these ranks. Blocks up to `config.start_timeout`; raises
    `RendezvousError` naming the ranks that did not come, and the addresses between which nothing passed."""
    deadline = _Patience(config.start_timeout, require_alive)
    with ExitStack() as stack:
        tcp = stack.enter_context(_listen_tcp(_own_address(rendezvous, config)))
        unix = stack.enter_context(_listen_unix())
        address = tcp.getsockname()
        mine = _Card(host or host_identity(), _unix_name(unix), join_address(address[0], address[1]))
        cards = [_Card.unpack(card) for card in rendezvous.allgather(mine.pack(), timeout=config.start_timeout)]
        topology = Topology.from_hosts(rendezvous.rank, [card.host for card in cards])
        segment, companions = _share_segment(rendezvous, config, topology, cards, unix, deadline)
        wiring = Wiring(topology, segment, deadline, companions=companions)
        try:
            wiring.remotes = _connect_remotes(rendezvous, topology, cards, tcp, deadline)
        except BaseException as error:
            wiring.abandon(error)
            raise
        return wiring


def _first_met(rendezvous: Rendezvous) -> Rendezvous:
    """Where the job's ranks met, of whom these may be only some."""
    return rendezvous.whole if isinstance(rendezvous, PartRendezvous) else rendezvous


def _own_address(rendezvous: Rendezvous, config: Config) -> str:
    if config.interface is not None:
        return interface_address(config.interface)
    address = rendezvous.address
    if address is None:
        return "127.0.0.1"
    # The interface by which this host reaches the rendezvous is one by which the others reach this host.
    where, port = split_address(address)
    family, kind, protocol, _, target = socket.getaddrinfo(where, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: sends nothing
        return str(probe.getsockname()[0])


@contextmanager
def _listen_tcp(address: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as listener:
        yield listener


@contextmanager
def _listen_unix() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("")  # Linux picks a free abstract name
        listener.listen(1024)
        yield listener


def _unix_name(listener: socket.socket) -> str:
    name: bytes = listener.getsockname()
    return name.hex()


def _share_segment(
    rendezvous: Rendezvous,
    config: Config,
    topology: Topology,
    cards: list[_Card],
    listener: socket.socket,
    deadline: Deadline,
) -> tuple[Segment, dict[int, socket.socket]]:
    local = topology.local_ranks
    # Whoever exchanges data with all ranks does so with those of its own host by rings.
    pair_rings = topology.local_size < topology.size and not make_grid(topology.host_numbers)

    def make() -> Segment:
        return Segment.create(ranks=len(local), slot_bytes=config.slot_bytes, pair_rings=pair_rings)

    met = _first_met(rendezvous)
    if isinstance(met, ThreadRendezvous):
        return met.shared(f"segment of {topology.hosts[topology.rank]}", make, rendezvous.generation), {}
    companions: dict[int, socket.socket] = {}
    leader, others = local[0], set(local[1:])
    if topology.rank != leader:
        with _reaching(leader), _dial(socket.AF_UNIX, bytes.fromhex(cards[leader].unix), deadline) as sock:
            _introduce(sock, rendezvous, "segment", leader)
            segment = _receive_segment(sock, deadline)
            return segment, {leader: sock.dup()}
    segment = make()

    def hand_over(sock: socket.socket, peer: int, _purpose: str) -> None:
        companions[peer] = sock.dup()
        with suppress(ConnectionError):  # it has just died: `settle` hears of it
            socket.send_fds(sock, [b"s"], [segment.fd])

    try:
        _accept(listener, rendezvous, {(peer, "segment") for peer in others}, hand_over, deadline)
    except BaseException as error:
        Wiring(topology, segment, deadline, companions=companions).abandon(error)
        raise
    return segment, companions


def _receive_segment(sock: socket.socket, deadline: Deadline) -> Segment:
    sock.settimeout(deadline.remaining())
    message, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    if not message or not descriptors:
        raise EOFError("it closed the connection before it handed over the shared memory")
    try:
        return Segment.attach(descriptors[0])
    finally:
        os.close(descriptors[0])


def _connect_remotes(
    rendezvous: Rendezvous, topology: Topology, cards: list[_Card], listener: socket.socket, deadline: Deadline
) -> list[tuple[int, int, int]]:
    """Connect to the ranks of other hosts that this one talks to: the higher rank dials, the lower one accepts."""
    rank = topology.rank
    remote = [peer for peer in range(topology.size) if topology.hosts[peer] != topology.hosts[rank]]
    exchanging = set(data_peers(rank, topology.host_numbers))
    sockets: dict[tuple[int, str], socket.socket] = {}

    parents = topology.control_parents
    address = join_address(*listener.getsockname()[:2])

    def purposes(peer: int) -> tuple[str, ...]:
        data = ("data",) if peer in exchanging else ()
        return (*data, "control") if parents[peer] == rank or parents[rank] == peer else data

    def keep(sock: socket.socket, peer: int, purpose: str) -> None:
        sockets[peer, purpose] = sock.dup()

    expected = {(peer, purpose) for peer in remote if peer > rank for purpose in purposes(peer)}
    failures: list[BaseException] = []

    def accept() -> None:
        try:
            _accept(listener, rendezvous, expected, keep, deadline)
        except RendezvousError as error:
            failures.append(_between(error, cards, address))
        except BaseException as error:
            failures.append(error)

    # While this rank dials the lower ranks, the higher ones dial it.
    acceptor = threading.Thread(target=accept, name="farandole-accept")
    acceptor.start()
    try:
        for peer in remote:
            for purpose in purposes(peer) if peer < rank else ():
                with _reaching(peer, f" at {cards[peer].tcp} from {address}"):
                    sock = _dial(socket.AF_INET, split_address(cards[peer].tcp), deadline)
                    sockets[peer, purpose] = sock
                    _introduce(sock, rendezvous, purpose, peer)
    except BaseException as error:
        failures.insert(0, error)
    acceptor.join()
    if failures:
        for sock in sockets.values():
            sock.close()
        raise failures[0]

    def fd_of(peer: int, purpose: str) -> int:
        sock = sockets.get((peer, purpose))
        return -1 if sock is None else sock.detach()

    return [(peer, fd_of(peer, "control"), fd_of(peer, "data")) for peer in remote if purposes(peer)]


def _between(error: RendezvousError, cards: list[_Card], address: str) -> RendezvousError:
    """Say between which addresses no connection came about."""
    theirs = ", ".join(f"{cards[peer].tcp} (rank {peer})" for peer in error.missing)
    return RendezvousError(f"{error.problem}: nothing came to {address} from {theirs}", error.missing)


@contextmanager
def _reaching(peer: int, where: str = "") -> Iterator[None]:
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


def _dial(family: int, address: bytes | tuple[str, int], deadline: Deadline) -> socket.socket:
    if isinstance(address, tuple):
        sock = socket.create_connection(address, timeout=deadline.remaining())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline.remaining())
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _introduce(sock: socket.socket, rendezvous: Rendezvous, purpose: str, peer: int) -> None:
    me = f"{rendezvous.rank} {purpose} {rendezvous.generation}".encode()
    who = authenticate(sock, rendezvous.secret, me=me, accept=False, timeout=HANDSHAKE_TIMEOUT)
    if who != str(peer).encode():
        raise AuthenticationError(f"it is {who.decode(errors='replace')!r} where rank {peer} was expected")


def _accept(
    listener: socket.socket,
    rendezvous: Rendezvous,
    expected: set[tuple[int, str]],
    welcome: Callable[[socket.socket, int, str], None],
    deadline: Deadline,
) -> None:
    """Accept until all of `expected` have come; strangers are turned away and delay nobody."""
    lock, all_came = threading.Lock(), threading.Event()
    threads: list[threading.Thread] = []
    wanted = len(expected)

    def receive(sock: socket.socket) -> None:
        with sock:
            try:
                me = str(rendezvous.rank).encode()
                who = authenticate(sock, rendezvous.secret, me=me, accept=True, timeout=HANDSHAKE_TIMEOUT)
            except AuthenticationError:
                return  # whoever it was has been refused; the expected peer is still awaited
            rank, purpose, generation = who.decode().split(" ")
            guest = (int(rank), purpose)
            with lock:
                if int(generation) != rendezvous.generation or guest not in expected:
                    return
                expected.discard(guest)
                welcome(sock, *guest)
                if not expected:
                    all_came.set()

    if not expected:
        return
    try:
        while not all_came.is_set():
            # As many have come as were expected: most likely the last handshake is just under way.
            if len(threads) >= wanted and all_came.wait(LOOK_AGAIN):
                break
            listener.settimeout(min(deadline.remaining(), LOOK_AGAIN))
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            threads.append(threading.Thread(target=receive, args=(sock,), name="farandole-handshake"))
            threads[-1].start()
    except TimeoutError as error:
        missing = {peer for peer, _ in expected}
        raise RendezvousError("peers did not connect in time", missing=sorted(missing)) from error
    finally:
        for thread in threads:
            thread.join()
