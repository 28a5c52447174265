"""Connections of a rank to its peers: the topology, one shared segment per host, and sockets between hosts.

Every rank opens its listeners, accepts peers from then on, and sends its card with its addresses to all other ranks.
Then it connects to the first rank of its host, for the descriptor of the shared segment, and to lower ranks of other
hosts: to those that it exchanges data with (`data_peers`), for a data socket, and to its neighbours in the tree of
control connections, for a control socket. Listeners are closed when all peers are connected. Bytes of a peer are used
only after the peer has proved the job's secret.
"""

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta

from farandole._native import MpiComm, Segment, data_peers, make_grid
from farandole.config import Config
from farandole.core.autotune.knobs import LARGEST_SLOT
from farandole.core.wiring.fabric import Offer, decide, log_choice, offer
from farandole.core.wiring.gpus import connect_nccl_by
from farandole.core.wiring.listeners import listen_tcp, listen_unix, unix_name
from farandole.core.wiring.mpi import make_communicator
from farandole.core.wiring.own_address import own_address
from farandole.core.wiring.peers import Arrivals, connect_to, reaching, report_missing
from farandole.errors import RendezvousError
from farandole.meeting.handshake import Deadline, join_address
from farandole.meeting.launched.mpi import MpiProcess
from farandole.meeting.rendezvous import Lifeline, PartRendezvous, Rendezvous, TcpRendezvous, ThreadRendezvous
from farandole.topology import Topology, host_identity

__all__ = ["Wiring", "connect"]

# Message between the ranks of one host after they have connected: the number of a missing rank, or RUNS for success.
WORD = struct.Struct("!i")
RUNS = -1
GRACE = timedelta(seconds=5)  # how long ranks wait, after the deadline, for the first rank's report of missing ranks


@dataclass
class Wiring:
    """The parts of which the native engine is built; the engine takes ownership of the descriptors in `remotes`.

    `companions` are the connections between the first rank of this host and its other ranks, by rank. They are closed
    by `settle` or `abandon`."""

    topology: Topology
    segment: Segment
    deadline: Deadline
    remotes: list[tuple[int, int, int]] = field(default_factory=list)  # (peer, control fd or -1, data fd or -1)
    companions: dict[int, socket.socket] = field(default_factory=dict)
    mpi: MpiComm | None = None  # transfers the data instead of sockets and the segment
    lifeline: Lifeline | None = None  # reports this rank's death to ranks of other hosts, until `settle`

    def settle(self) -> None:
        """Report that this rank's engine runs, and block until the engines of all ranks of this host run.

        From then on the shared segment shows which ranks die. Ranks that have died before are marked dead in it, so
        that no rank waits for them. Raises `RendezvousError` with a rank that did not start in time, or that another
        rank of this host misses."""
        leads = self.topology.rank == self.topology.local_ranks[0]
        if not leads:
            self._send(RUNS)
        for peer, sock in self.companions.items():
            word = self._receive(peer, sock, timedelta(0) if leads else GRACE)
            if word is None:
                self.segment.mark_dead(peer)
            elif word != RUNS:
                raise RendezvousError(f"rank {peer} could not connect to all ranks", missing=(word,))
        if leads:
            self._send(RUNS)
        self._close()

    def abandon(self, error: BaseException) -> None:
        """Close all connections; before that, report the missing rank of `error`, if any, to the ranks of this host."""
        if isinstance(error, RendezvousError) and error.missing:
            self._send(error.missing[0])
        self._close(failed=not isinstance(error, RendezvousError))

    def _send(self, word: int) -> None:
        for sock in self.companions.values():
            with suppress(ConnectionError):  # the peer has died; ranks that wait for it find out by themselves
                sock.sendall(WORD.pack(word))

    def _receive(self, peer: int, sock: socket.socket, grace: timedelta) -> int | None:
        """Return the word from `peer`, None if the peer has died. Blocks until the deadline and `grace` have passed."""
        try:
            sock.settimeout(self.deadline.remaining() + grace.total_seconds())
            received = sock.recv(WORD.size, socket.MSG_WAITALL)
        except TimeoutError as error:
            raise RendezvousError("a rank of this host did not start its engine in time", missing=(peer,)) from error
        except ConnectionError:
            return None
        return int(WORD.unpack(received)[0]) if len(received) == WORD.size else None

    def _close(self, *, failed: bool = False) -> None:
        if self.lifeline is not None:
            self.lifeline.close(failed=failed)
        for sock in self.companions.values():
            sock.close()


@dataclass(frozen=True)
class _Card:
    """A rank's message in the rendezvous: its host, addresses and settings."""

    host: str
    unix: str  # name in the abstract namespace, which leaves no file behind
    tcp: str  # host:port
    # All ranks use rank 0's values: whether to connect all ranks of all hosts, even for a grid, and bytes per slot.
    flat: bool
    slot_bytes: int
    offer: Offer  # of MPI as the fabric

    def pack(self) -> bytes:
        return json.dumps(astuple(self)).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> "_Card":
        host, unix, tcp, flat, slot_bytes, offer = json.loads(payload)
        return cls(host, unix, tcp, flat, slot_bytes, Offer(*offer))


class _Patience(Deadline):
    """Deadline that ends early, with the error of one of `checks`, when a peer is known to be lost."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self.checks: list[Callable[[], None]] = []

    def remaining(self) -> float:
        """Return the remaining seconds; raises `TimeoutError` at the deadline, or the error of a check."""
        for check in self.checks:
            check()
        return super().remaining()


def connect(
    rendezvous: Rendezvous,
    config: Config,
    *,
    host: str | None = None,
    require_alive: Callable[[], None] | None = None,
) -> Wiring:
    """Exchange cards with all ranks at `rendezvous`, and connect to this rank's peers.

    `host` overrides this host's identity, so that tests can simulate several hosts. `require_alive` raises an error if
    one of the ranks is known to be lost. Blocks up to `config.start_timeout`; raises `RendezvousError` with the missing
    ranks, and with the addresses between which no connection was made."""
    deadline = _Patience(config.start_timeout)
    offered, mpi = offer(_first_met(rendezvous), rendezvous.size, config, deadline)
    with ExitStack() as stack:
        host_address = own_address(rendezvous, config, deadline)
        if config.interface is not None:
            connect_nccl_by(host_address)
        tcp = stack.enter_context(listen_tcp(host_address))
        unix = stack.enter_context(listen_unix())
        arrivals = Arrivals([tcp, unix], rendezvous)
        stack.callback(arrivals.close)
        deadline.checks += [arrivals.require_none_lost, *([require_alive] if require_alive else [])]
        address = tcp.getsockname()
        where = host or host_identity(), unix_name(unix), join_address(address[0], address[1])
        mine = _Card(*where, *_room_to_tune(rendezvous, config), offered)
        payloads, lifeline = _meet(rendezvous, mine.pack(), arrivals, config.start_timeout)
        try:
            cards = [_Card.unpack(payload) for payload in payloads]
            topology = Topology.from_hosts(rendezvous.rank, [card.host for card in cards])
            if topology.local_size == topology.size:
                arrivals.drop(tcp)
            if topology.rank != topology.local_ranks[0] or topology.local_size == 1:
                arrivals.drop(unix)
            wiring = _wire(rendezvous, topology, cards, arrivals, deadline, mpi)
        except BaseException as error:
            if isinstance(error, RendezvousError) and error.missing:
                # Report while this rank still listens: a peer that it refuses later waits for the report.
                remote = {peer: card.tcp for peer, card in enumerate(cards) if card.host != mine.host}
                report_missing(error.missing[0], remote, rendezvous)
            if lifeline is not None:
                lifeline.close(failed=not isinstance(error, RendezvousError))
            raise
        wiring.lifeline = lifeline
        return wiring


def _meet(
    rendezvous: Rendezvous, payload: bytes, arrivals: Arrivals, timeout: timedelta
) -> tuple[list[bytes], Lifeline | None]:
    """Exchange `payload` with all ranks. A `TcpRendezvous` also reports later deaths of ranks to `arrivals`."""
    if isinstance(rendezvous, TcpRendezvous):
        return rendezvous.allgather_and_watch(payload, arrivals.lose, timeout=timeout)
    return rendezvous.allgather(payload, timeout=timeout), None


def _room_to_tune(rendezvous: Rendezvous, config: Config) -> tuple[bool, int]:
    """Return whether to connect all ranks of all hosts, and bytes per slot; with room for all values of autotune."""
    if config.fabric == "mpi":
        return False, config.slot_bytes
    tunes = config.autotune and not isinstance(rendezvous, PartRendezvous)
    flat = not config.hierarchical or (tunes and config.leaves_free("hierarchical"))
    return flat, LARGEST_SLOT if tunes and config.leaves_free("slot_bytes") else config.slot_bytes


def _wire(
    rendezvous: Rendezvous,
    topology: Topology,
    cards: list[_Card],
    arrivals: Arrivals,
    deadline: Deadline,
    mpi: MpiProcess | None,
) -> Wiring:
    segment, companions = _share_segment(rendezvous, topology, cards, arrivals, deadline)
    wiring = Wiring(topology, segment, deadline, companions=companions)
    try:
        offers = [card.offer for card in cards]
        by_mpi = decide(offers, topology.hosts)
        if rendezvous.rank == 0 and not isinstance(rendezvous, PartRendezvous):
            log_choice(offers, topology.hosts, mpi)
        wiring.remotes = _connect_remotes(rendezvous, topology, cards, arrivals, deadline, by_mpi=by_mpi)
        if by_mpi and mpi is not None:
            wiring.mpi = make_communicator(mpi, [each.place for each in offers], deadline)
    except BaseException as error:
        for descriptor in (each for _, *pair in wiring.remotes for each in pair if each >= 0):
            os.close(descriptor)
        wiring.abandon(error)
        raise
    return wiring


def _first_met(rendezvous: Rendezvous) -> Rendezvous:
    """Return the rendezvous of all ranks of the job; `rendezvous` may be for a process set."""
    return rendezvous.whole if isinstance(rendezvous, PartRendezvous) else rendezvous


def _share_segment(
    rendezvous: Rendezvous,
    topology: Topology,
    cards: list[_Card],
    arrivals: Arrivals,
    deadline: Deadline,
) -> tuple[Segment, dict[int, socket.socket]]:
    local = topology.local_ranks
    # If all ranks of all hosts are connected, ranks of one host exchange data through rings in the segment.
    pair_rings = topology.local_size < topology.size and (cards[0].flat or not make_grid(topology.host_numbers))

    def make() -> Segment:
        try:
            return Segment.create(ranks=len(local), slot_bytes=cards[0].slot_bytes, pair_rings=pair_rings)
        except OSError as error:
            raise RendezvousError(
                f"the ranks of this host cannot have {error.strerror}; raise the limit on the size of files "
                "(ulimit -f) or on memory, or set FARANDOLE_SLOT_BYTES to less"
            ) from error

    met = _first_met(rendezvous)
    if isinstance(met, ThreadRendezvous):
        return met.shared(f"segment of {topology.hosts[topology.rank]}", make, rendezvous.generation), {}
    companions: dict[int, socket.socket] = {}
    leader, others = local[0], set(local[1:])
    if topology.rank != leader:
        name = bytes.fromhex(cards[leader].unix)
        with (
            _explained(arrivals),
            reaching(leader),
            connect_to(name, rendezvous, "segment", leader, deadline) as sock,
        ):
            segment = _receive_segment(sock, deadline)
            return segment, {leader: sock.dup()}
    segment = make()
    expected = {(peer, "segment") for peer in others}
    try:
        while expected:
            arrived, sock = arrivals.take(expected, deadline)
            expected.discard(arrived)
            companions[arrived[0]] = sock
            with suppress(ConnectionError):  # the peer has just died; `settle` notices it
                socket.send_fds(sock, [b"s"], [segment.fd])
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
    rendezvous: Rendezvous,
    topology: Topology,
    cards: list[_Card],
    arrivals: Arrivals,
    deadline: Deadline,
    *,
    by_mpi: bool,
) -> list[tuple[int, int, int]]:
    """Connect to this rank's peers on other hosts: the higher rank dials, the lower rank accepts.

    Returns (peer, control descriptor or -1, data descriptor or -1) for each of them."""
    rank = topology.rank
    remote = [peer for peer in range(topology.size) if topology.hosts[peer] != topology.hosts[rank]]
    exchanging = set() if by_mpi else set(data_peers(rank, topology.host_numbers, cards[0].flat))
    sockets: dict[tuple[int, str], socket.socket] = {}
    parents, address = topology.control_parents, cards[rank].tcp

    def purposes(peer: int) -> tuple[str, ...]:
        data = ("data",) if peer in exchanging else ()
        return (*data, "control") if parents[peer] == rank or parents[rank] == peer else data

    expected = {(peer, purpose) for peer in remote if peer > rank for purpose in purposes(peer)}
    try:
        # While this rank dials lower ranks, higher ranks dial this one.
        for peer in remote:
            for purpose in purposes(peer) if peer < rank else ():
                with _explained(arrivals), reaching(peer, f" at {cards[peer].tcp} from {address}"):
                    sockets[peer, purpose] = connect_to(cards[peer].tcp, rendezvous, purpose, peer, deadline)
        while expected:
            with _between(cards, address):
                arrived, sock = arrivals.take(expected, deadline)
            expected.discard(arrived)
            sockets[arrived] = sock
    except BaseException:
        for sock in sockets.values():
            sock.close()
        raise

    def fd_of(peer: int, purpose: str) -> int:
        sock = sockets.get((peer, purpose))
        return -1 if sock is None else sock.detach()

    return [(peer, fd_of(peer, "control"), fd_of(peer, "data")) for peer in remote if purposes(peer)]


@contextmanager
def _explained(arrivals: Arrivals) -> Iterator[None]:
    """Replace the failure to reach a peer by its cause, such as the peer's report of a missing rank, if it is known."""
    try:
        yield
    except RendezvousError:
        reported = arrivals.reported_loss()
        if reported is not None:
            raise reported from None
        raise


@contextmanager
def _between(cards: list[_Card], address: str) -> Iterator[None]:
    """Add the addresses of both ends to the error of peers that did not connect in time."""
    try:
        yield
    except RendezvousError as error:
        if not isinstance(error.__cause__, TimeoutError):
            raise
        theirs = ", ".join(f"{cards[peer].tcp} (rank {peer})" for peer in error.missing)
        problem = f"{error.problem}: nothing came to {address} from {theirs}"
        raise RendezvousError(problem, error.missing) from error.__cause__
