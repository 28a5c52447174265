"""Connections of a rank to its peers: the topology, one shared segment per host, and sockets between hosts.

Every rank opens its listeners, accepts peers from then on, and sends its card with its addresses to all other ranks.
Then it connects to the first rank of its host, for the descriptor of the shared segment, and to lower ranks of other
hosts: to those that it exchanges data with (`data_peers`), for a data socket, and to its neighbours in the tree of
control connections, for a control socket. Listeners are closed when all peers are connected. Bytes of a peer are used
only after the peer has proved the job's secret.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from farandole._native import Segment, data_peers, make_grid
from farandole.config import Config
from farandole.core.autotune.knobs import LARGEST_SLOT
from farandole.core.wiring.choice import OWN, Offer, decide, is_fabric, log_choice, offer
from farandole.core.wiring.connections import Connections
from farandole.core.wiring.fabric import Fabric
from farandole.core.wiring.gpus import connect_nccl_by
from farandole.core.wiring.listeners import listen_tcp, listen_unix, unix_name
from farandole.core.wiring.own_address import own_address
from farandole.core.wiring.peers import Arrivals, connect_to, reaching, report_missing
from farandole.cores import UsableCores, cores_of_all
from farandole.errors import RendezvousError
from farandole.meeting.addresses import join_address
from farandole.meeting.frames import Deadline, decode, encode
from farandole.meeting.rendezvous import Rendezvous
from farandole.topology import Topology, host_identity

CROWDED_STRIPE = 3 << 20  # bytes of the chunks of all ranks of a host with fewer cores


@dataclass(frozen=True)
class _Card:
    """A rank's message in the rendezvous: its host, addresses and settings."""

    host: str
    unix: str  # name in the abstract namespace, which leaves no file behind
    tcp: str  # host:port
    # All ranks use rank 0's values.
    flat: bool  # connect all ranks of all hosts, even for a grid
    slot_bytes: int  # that the segment has room for
    chunk: int  # bytes of a slot that operations use at first
    is_chunk_chosen: bool  # by the user
    # The rank's own.
    cores: UsableCores
    offer: Offer  # of a fabric


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
    transfers: bool = False,
) -> Connections:
    """Exchange cards with all ranks at `rendezvous`, and connect to this rank's peers.

    `host` overrides this host's identity, so that tests can simulate several hosts. `require_alive` raises an error if
    one of the ranks is known to be lost. With `transfers`, on all ranks, each pair of ranks gets a link for messages
    between the two. Blocks up to `config.start_timeout`; raises `RendezvousError` with the missing
    ranks, and with the addresses between which no connection was made."""
    deadline = _Patience(config.start_timeout)
    offered, fabric = offer(rendezvous, config, deadline)
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
        chunk = config.slot_bytes, not config.leaves_free("slot_bytes")
        mine = _Card(*where, *_room_to_tune(rendezvous, config), *chunk, UsableCores.of_this_thread(), offered)
        payloads, lifeline = rendezvous.allgather_and_watch(encode(mine), arrivals.lose, timeout=config.start_timeout)
        try:
            cards = [decode(payload, _Card) for payload in payloads]
            topology = Topology.from_hosts(rendezvous.rank, [card.host for card in cards])
            if topology.local_size == topology.size:
                arrivals.drop(tcp)
            if topology.rank != topology.local_ranks[0] or topology.local_size == 1:
                arrivals.drop(unix)
            connections = _Connector(rendezvous, topology, cards, arrivals, deadline, transfers).connect(fabric)
        except BaseException as error:
            if isinstance(error, RendezvousError) and error.missing:
                # Report while this rank still listens: a peer that it refuses later waits for the report.
                remote = {peer: card.tcp for peer, card in enumerate(cards) if card.host != mine.host}
                report_missing(error.missing[0], remote, rendezvous)
            if lifeline is not None:
                lifeline.close(failed=not isinstance(error, RendezvousError))
            raise
        connections.lifeline = lifeline
        return connections


def _room_to_tune(rendezvous: Rendezvous, config: Config) -> tuple[bool, int]:
    """Return whether to connect all ranks of all hosts, and bytes per slot; with room for all values of autotune."""
    if is_fabric(config.fabric):
        return False, config.slot_bytes
    tunes = config.autotune and rendezvous.whole is rendezvous
    flat = not config.hierarchical or (tunes and config.leaves_free("hierarchical"))
    return flat, LARGEST_SLOT if tunes and config.leaves_free("slot_bytes") else config.slot_bytes


def _chunk(cards: list[_Card]) -> int:
    """Return the bytes of a slot that operations use at first, as rank 0's host needs them.

    If its ranks have fewer cores, the chunks are larger, because each may cost a wait for a core."""
    first = cards[0]
    ranks = sum(card.host == first.host for card in cards)
    if first.is_chunk_chosen or _cores(cards, first.host) >= ranks:
        return first.chunk
    return max(first.chunk, min(LARGEST_SLOT, 1 << (CROWDED_STRIPE // ranks).bit_length() - 1))


def _cores(cards: list[_Card], host: str) -> int:
    """Return how many cores the ranks of a host may keep busy."""
    return cores_of_all(card.cores for card in cards if card.host == host)


class _Connector:
    """A rank that knows the cards of all ranks, while it connects to its peers."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        topology: Topology,
        cards: list[_Card],
        arrivals: Arrivals,
        deadline: Deadline,
        transfers: bool,
    ) -> None:
        self._rendezvous, self._topology, self._cards = rendezvous, topology, cards
        self._arrivals, self._deadline, self._transfers = arrivals, deadline, transfers
        self._chunk, self._cores = _chunk(cards), _cores(cards, topology.hosts[topology.rank])

    def connect(self, fabric: Fabric | None) -> Connections:
        """Share the segment of this host, connect to ranks of other hosts, and over the fabric that all have chosen."""
        segment, companions = self._share_segment()
        connections = Connections(self._topology, segment, self._deadline, self._chunk, self._cores, companions)
        offers, hosts = [card.offer for card in self._cards], self._topology.hosts
        try:
            connections.fabric_name = decide(offers, hosts)
            if self._rendezvous.rank == 0 and self._rendezvous.whole is self._rendezvous:
                log_choice(offers, hosts, fabric)
            connections.remotes = self._connect_remotes(with_data=connections.fabric_name == OWN)
            if fabric is not None and connections.fabric_name != OWN:
                connections.fabric = fabric.connect([each.address for each in offers], self._deadline)
        except BaseException as error:
            for descriptor in (each for _, *pair in connections.remotes for each in pair if each >= 0):
                os.close(descriptor)
            connections.abandon(error)
            raise
        return connections

    def _share_segment(self) -> tuple[Segment, dict[int, socket.socket]]:
        """Return this host's segment, and the connections between its first rank and its others, by rank."""
        rendezvous, topology = self._rendezvous, self._topology
        key = f"segment of {topology.hosts[topology.rank]}"
        shared = rendezvous.whole.shared(key, self._make_segment, rendezvous.generation)
        if shared is not None:
            return shared, {}
        leader, *others = topology.local_ranks
        if topology.rank != leader:
            name = bytes.fromhex(self._cards[leader].unix)
            with self._reaching(leader), self._dialed(name, "segment", leader) as sock:
                segment = _receive_segment(sock, self._deadline)
                return segment, {leader: sock.dup()}
        connections = Connections(topology, self._make_segment(), self._deadline, self._chunk, self._cores)
        expected = {(peer, "segment") for peer in others}
        try:
            while expected:
                arrived, sock = self._arrivals.take(expected, self._deadline)
                expected.discard(arrived)
                connections.companions[arrived[0]] = sock
                with suppress(ConnectionError):  # the peer has just died; `settle` notices it
                    socket.send_fds(sock, [b"s"], [connections.segment.fd])
        except BaseException as error:
            connections.abandon(error)
            raise
        return connections.segment, connections.companions

    def _make_segment(self) -> Segment:
        topology, first = self._topology, self._cards[0]
        # If all ranks of all hosts are connected, ranks of one host exchange data through rings in the segment.
        pair_rings = topology.local_size < topology.size and (first.flat or not make_grid(topology.host_numbers))
        try:
            room = max(first.slot_bytes, self._chunk)
            return Segment.create(topology.local_size, room, pair_rings, self._transfers)
        except OSError as error:
            raise RendezvousError(
                f"the ranks of this host cannot have {error.strerror}; raise the limit on the size of files "
                "(ulimit -f) or on memory, or set FARANDOLE_SLOT_BYTES to less"
            ) from error

    def _connect_remotes(self, *, with_data: bool) -> list[tuple[int, int, int, int]]:
        """Connect to this rank's peers on other hosts: the higher rank dials, the lower rank accepts.

        Returns (peer, control, data and transfers descriptor, or -1) for each of them."""
        topology, cards = self._topology, self._cards
        rank, parents, address = topology.rank, topology.control_parents, cards[topology.rank].tcp
        remote = [peer for peer in range(topology.size) if topology.hosts[peer] != topology.hosts[rank]]
        exchanging = set(data_peers(rank, topology.host_numbers, cards[0].flat)) if with_data else set()
        sockets: dict[tuple[int, str], socket.socket] = {}

        def purposes(peer: int) -> tuple[str, ...]:
            wanted = {
                "data": peer in exchanging,
                "control": parents[peer] == rank or parents[rank] == peer,
                "transfers": self._transfers,
            }
            return tuple(purpose for purpose in wanted if wanted[purpose])

        expected = {(peer, purpose) for peer in remote if peer > rank for purpose in purposes(peer)}
        try:
            # While this rank dials lower ranks, higher ranks dial this one.
            for peer in remote:
                for purpose in purposes(peer) if peer < rank else ():
                    with self._reaching(peer, f" at {cards[peer].tcp} from {address}"):
                        sockets[peer, purpose] = self._dialed(cards[peer].tcp, purpose, peer)
            while expected:
                with _between(cards, address):
                    arrived, sock = self._arrivals.take(expected, self._deadline)
                expected.discard(arrived)
                sockets[arrived] = sock
        except BaseException:
            for sock in sockets.values():
                sock.close()
            raise

        def fd_of(peer: int, purpose: str) -> int:
            sock = sockets.get((peer, purpose))
            return -1 if sock is None else sock.detach()

        return [
            (peer, fd_of(peer, "control"), fd_of(peer, "data"), fd_of(peer, "transfers"))
            for peer in remote
            if purposes(peer)
        ]

    def _dialed(self, address: bytes | str, purpose: str, peer: int) -> socket.socket:
        return connect_to(address, self._rendezvous, purpose, peer, self._deadline)

    @contextmanager
    def _reaching(self, peer: int, where: str = "") -> Iterator[None]:
        """Name `peer` in the failure to reach it, or its cause, such as the peer's report of a missing rank."""
        try:
            with reaching(peer, where):
                yield
        except RendezvousError:
            reported = self._arrivals.reported_loss()
            if reported is not None:
                raise reported from None
            raise


def _receive_segment(sock: socket.socket, deadline: Deadline) -> Segment:
    sock.settimeout(deadline.remaining())
    message, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    if not message or not descriptors:
        raise EOFError("it closed the connection before it handed over the shared memory")
    try:
        return Segment.attach(descriptors[0])
    finally:
        os.close(descriptors[0])


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
