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
from farandole.core.callers import Reception, call, reaching, tell_missed
from farandole.core.knobs import LARGEST_SLOT
from farandole.errors import RendezvousError
from farandole.handshake import Deadline, join_address, split_address
from farandole.rendezvous import PartRendezvous, Rendezvous, TcpRendezvous, ThreadRendezvous
from farandole.topology import Topology, host_identity, interface_address

__all__ = ["Wiring", "connect"]

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
    # What all ranks do as the first one says: connect to everybody beyond a grid, and make slots of so many bytes.
    flat: bool
    slot_bytes: int

    def pack(self) -> bytes:
        return json.dumps([self.host, self.unix, self.tcp, self.flat, self.slot_bytes]).encode()

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
        where = host or host_identity(), _unix_name(unix), join_address(address[0], address[1])
        mine = _Card(*where, *_room_to_tune(rendezvous, config))
        cards = [_Card.unpack(card) for card in rendezvous.allgather(mine.pack(), timeout=config.start_timeout)]
        topology = Topology.from_hosts(rendezvous.rank, [card.host for card in cards])
        try:
            return _wire(rendezvous, config, topology, cards, unix, tcp, deadline)
        except RendezvousError as error:
            # While this rank still listens: who is refused by it listens for this word.
            if error.missing:
                remote = {peer: card.tcp for peer, card in enumerate(cards) if card.host != mine.host}
                tell_missed(error.missing[0], remote, rendezvous)
            raise


def _room_to_tune(rendezvous: Rendezvous, config: Config) -> tuple[bool, int]:
    """Must ranks be able to work in one level, and how large are the slots? Autotune may use more than the settings."""
    tunes = config.autotune and not isinstance(rendezvous, PartRendezvous)
    flat = not config.hierarchical or (tunes and config.leaves_free("hierarchical"))
    return flat, LARGEST_SLOT if tunes and config.leaves_free("slot_bytes") else config.slot_bytes


def _wire(
    rendezvous: Rendezvous,
    config: Config,
    topology: Topology,
    cards: list[_Card],
    unix: socket.socket,
    tcp: socket.socket,
    deadline: Deadline,
) -> Wiring:
    segment, companions = _share_segment(rendezvous, topology, cards, unix, deadline)
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
    met = _first_met(rendezvous)
    if not isinstance(met, TcpRendezvous):
        return "127.0.0.1"
    # The interface by which this host reaches the rendezvous is one by which the others reach this host.
    where, port = split_address(met.address)
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
    topology: Topology,
    cards: list[_Card],
    listener: socket.socket,
    deadline: Deadline,
) -> tuple[Segment, dict[int, socket.socket]]:
    local = topology.local_ranks
    # Whoever exchanges data with all ranks does so with those of its own host by rings.
    pair_rings = topology.local_size < topology.size and (cards[0].flat or not make_grid(topology.host_numbers))

    def make() -> Segment:
        return Segment.create(ranks=len(local), slot_bytes=cards[0].slot_bytes, pair_rings=pair_rings)

    met = _first_met(rendezvous)
    if isinstance(met, ThreadRendezvous):
        return met.shared(f"segment of {topology.hosts[topology.rank]}", make, rendezvous.generation), {}
    companions: dict[int, socket.socket] = {}
    leader, others = local[0], set(local[1:])
    if topology.rank != leader:
        name = bytes.fromhex(cards[leader].unix)
        with reaching(leader), call(name, rendezvous, "segment", leader, deadline) as sock:
            segment = _receive_segment(sock, deadline)
            return segment, {leader: sock.dup()}
    segment = make()

    def hand_over(sock: socket.socket, peer: int, _purpose: str) -> None:
        companions[peer] = sock.dup()
        with suppress(ConnectionError):  # it has just died: `settle` hears of it
            socket.send_fds(sock, [b"s"], [segment.fd])

    try:
        Reception(listener, rendezvous, {(peer, "segment") for peer in others}, hand_over).run(deadline)
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
    exchanging = set(data_peers(rank, topology.host_numbers, cards[0].flat))
    sockets: dict[tuple[int, str], socket.socket] = {}

    parents = topology.control_parents
    address = join_address(*listener.getsockname()[:2])

    def purposes(peer: int) -> tuple[str, ...]:
        data = ("data",) if peer in exchanging else ()
        return (*data, "control") if parents[peer] == rank or parents[rank] == peer else data

    def keep(sock: socket.socket, peer: int, purpose: str) -> None:
        sockets[peer, purpose] = sock.dup()

    expected = {(peer, purpose) for peer in remote if peer > rank for purpose in purposes(peer)}
    reception = Reception(listener, rendezvous, expected, keep, calls=True)
    failures: list[BaseException] = []

    def accept() -> None:
        try:
            reception.run(deadline)
        except BaseException as error:
            failures.append(_between(error, cards, address))

    # While this rank calls the lower ranks, the higher ones call it.
    acceptor = threading.Thread(target=accept, name="farandole-accept")
    acceptor.start()
    try:
        for peer in remote:
            for purpose in purposes(peer) if peer < rank else ():
                with reaching(peer, f" at {cards[peer].tcp} from {address}"):
                    sockets[peer, purpose] = call(cards[peer].tcp, rendezvous, purpose, peer, deadline)
        reception.calls_are_done()
    except RendezvousError as error:
        reception.stop()
        acceptor.join()
        # It may be one that has given up, for want of another.
        failures.append(reception.hearsay() or error)
    except BaseException as error:
        reception.stop()
        failures.append(error)
    acceptor.join()
    if failures:
        for sock in sockets.values():
            sock.close()
        raise failures[0]

    def fd_of(peer: int, purpose: str) -> int:
        sock = sockets.get((peer, purpose))
        return -1 if sock is None else sock.detach()

    return [(peer, fd_of(peer, "control"), fd_of(peer, "data")) for peer in remote if purposes(peer)]


def _between(error: BaseException, cards: list[_Card], address: str) -> BaseException:
    """When nobody called, say between which addresses."""
    if not isinstance(error, RendezvousError) or not isinstance(error.__cause__, TimeoutError):
        return error
    theirs = ", ".join(f"{cards[peer].tcp} (rank {peer})" for peer in error.missing)
    return RendezvousError(f"{error.problem}: nothing came to {address} from {theirs}", error.missing)
