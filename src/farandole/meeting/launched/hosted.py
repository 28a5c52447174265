"""Rendezvous served by rank 0, for ranks whose launcher only lets them exchange a few bytes."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from farandole.config import Config
from farandole.errors import AuthenticationError, RendezvousError
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, decode, encode
from farandole.meeting.handshake import new_secret
from farandole.meeting.rendezvous import TcpRendezvous
from farandole.meeting.rounds import Caller
from farandole.meeting.server import RendezvousServer
from farandole.other_launchers import OtherLaunch
from farandole.topology import host_identity, interface_addresses, own_addresses

log = logging.getLogger(__name__)

REACH = timedelta(seconds=5)  # for a connection to one of rank 0's addresses


@dataclass(frozen=True, slots=True)
class _Served:
    """Rank 0's message to all ranks."""

    secret: bytes
    addresses: list[str]


@dataclass(frozen=True, slots=True)
class _Reached:
    """A rank's host, and the addresses of rank 0 that it reaches."""

    host: str
    addresses: list[str]


class Exchange(Protocol):
    """Means of a launcher by which its processes exchange a few bytes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def share(self, payload: bytes, deadline: Deadline) -> bytes:
        """Return rank 0's `payload` on every rank; blocks up to `deadline`, then raises `RendezvousError`."""
        ...

    def close(self) -> None:
        """Remove what `share` has left behind. Rank 0 calls this once every rank has the payload."""
        ...


class HostedRendezvous(TcpRendezvous):
    """Rendezvous at a server in the process of rank 0, which ends when rank 0 closes its rendezvous."""

    def __init__(
        self, addresses: list[str], rank: int, size: int, secret: bytes, server: RendezvousServer | None
    ) -> None:
        super().__init__(addresses[0], rank, size, secret)
        self._server = server
        self.hosts: list[str] = []  # the identity of each rank's host, once `settle` has returned
        self._addresses = addresses

    def settle(self, deadline: Deadline) -> None:
        """Choose the first address of rank 0 that all ranks reach; blocks up to `deadline`.

        Raises `RendezvousError` if there is none, naming the addresses that each rank reaches, and `TimeoutError` if no
        time is left."""
        reached = _reachable(self._addresses, self.rank, self.size, self.secret, deadline)
        if not reached:
            raise RendezvousError(
                f"rank {self.rank} on {socket.gethostname()} reaches rank 0 at none of its addresses "
                f"({', '.join(self._addresses)}); look at routes and firewalls, or name a network with "
                "FARANDOLE_INTERFACE"
            )
        self.address = reached[0]
        card = encode(_Reached(host_identity(), reached))
        gathered = self.allgather(card, timeout=timedelta(seconds=deadline.remaining()))
        cards = [decode(each, _Reached) for each in gathered]
        self.hosts = [each.host for each in cards]
        common = [each for each in self._addresses if all(each in card.addresses for card in cards)]
        if not common:
            ways = "; ".join(f"rank {rank} at {' and '.join(each.addresses)}" for rank, each in enumerate(cards))
            raise RendezvousError(
                f"no address of rank 0 is reached by all ranks, so name one with FARANDOLE_INTERFACE ({ways})"
            )
        self.address = common[0]
        log.info("rank %d of %d meets the others at %s", self.rank, self.size, self.address)

    def close(self) -> None:
        """End this rank's participation; on rank 0 also the server."""
        super().close()
        if self._server is not None:
            self._server.close()
            self._server = None


def meet(exchange: Exchange, config: Config, deadline: Deadline, launch: OtherLaunch | None = None) -> HostedRendezvous:
    """Serve a rendezvous on rank 0, give all ranks its addresses by `exchange`, and choose an address that all reach.

    `launch` is that of the ranks, if one is known. Blocks until every rank has arrived, up to `deadline`; raises
    `RendezvousError`."""
    server, card = None, b""
    if exchange.rank == 0:
        hosts = own_addresses() if config.interface is None else interface_addresses(config.interface)
        secret = new_secret()
        server = RendezvousServer(exchange.size, secret, host=hosts[0], others=hosts[1:])
        card = encode(_Served(secret, server.addresses))
    try:
        served = decode(exchange.share(card, deadline), _Served)
        rendezvous = HostedRendezvous(served.addresses, exchange.rank, exchange.size, served.secret, server)
        rendezvous.launch = launch
        try:
            rendezvous.settle(deadline)
        except TimeoutError as error:
            raise RendezvousError(
                f"rank {exchange.rank} got the address of rank 0 too late to connect ({error}); start all ranks at the "
                "same time, or raise FARANDOLE_START_TIMEOUT"
            ) from error
    except BaseException:
        if server is not None:
            server.close()
        raise
    finally:
        # On success every rank has the payload, and none can leave `init` or share again before rank 0 does.
        if exchange.rank == 0:
            exchange.close()
    return rendezvous


def _reachable(addresses: list[str], rank: int, size: int, secret: bytes, deadline: Deadline) -> list[str]:
    """Return the `addresses` at which a peer proves the secret: from here an address may lead to another machine."""
    me = encode(Caller(rank=rank, size=size, generation=0, round=0))

    def reaches(address: str) -> bool:
        limit = min(REACH, timedelta(seconds=deadline.remaining()))
        try:
            sock, _ = dial(address, secret, me=me, deadline=Deadline(limit))
        except (OSError, AuthenticationError) as error:
            log.debug("rank %d does not reach rank 0 at %s: %s", rank, address, error)
            return False
        sock.close()
        return True

    with ThreadPoolExecutor(len(addresses)) as pool:
        return [address for address, found in zip(addresses, pool.map(reaches, addresses), strict=True) if found]
