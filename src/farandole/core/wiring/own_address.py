"""Choice of the address of this host at which a rank listens."""

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import TypeAlias

from farandole.config import Config
from farandole.errors import RendezvousError
from farandole.meeting.addresses import split_address
from farandole.meeting.frames import Deadline
from farandole.meeting.rendezvous import Rendezvous
from farandole.topology import interface_addresses, loopback_address

LOOKUP_PAUSE = 0.5  # seconds between two lookups of a host name
CONNECT = 2.0  # seconds for a test connection from one address

# The address of a socket, as `getaddrinfo` returns it.
Target: TypeAlias = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


def own_address(rendezvous: Rendezvous, config: Config, deadline: Deadline) -> str:
    """Return an address of the setting `interface`, or else the address from which this host reaches the rendezvous.

    If `interface` has several addresses, it is the first one from which a connection to the rendezvous succeeds. May
    block for a name lookup and for connections; raises `RendezvousError` if this host has no route to it."""
    return address_toward(rendezvous.address, config, deadline)


def address_toward(there: str | None, config: Config, deadline: Deadline) -> str:
    """Do as `own_address` does, for the rendezvous, or a service of the job, at `there`; None: on this host."""
    if config.interface is not None:
        own = interface_addresses(config.interface)
        if len(own) == 1 or there is None:
            return own[0]
        return first_that_connects(own, _looked_up(there, deadline)[-1], deadline)
    if there is None:
        return loopback_address()
    # Other hosts reach this host through the interface through which it reaches the rendezvous.
    family, kind, protocol, _, target = _looked_up(there, deadline)
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(target)  # a datagram socket sends nothing
        except OSError as error:
            raise RendezvousError(
                f"this host has no way there ({error.strerror}): look at its interfaces (ip address, ip route)",
                where=there,
            ) from error
        return str(probe.getsockname()[0])


def first_that_connects(own: Sequence[str], target: Target, deadline: Deadline) -> str:
    """Return the first of this host's addresses `own` from which a connection to `target` succeeds.

    If `target` is on this host, its own address is chosen, because other hosts reach that one. If no connection
    succeeds, the first address is returned, and the error of the rendezvous shows it."""
    if target[0] in own:
        return str(target[0])
    for address in own:
        with contextlib.suppress(OSError):
            limit = min(CONNECT, deadline.remaining())
            socket.create_connection((str(target[0]), target[1]), limit, source_address=(address, 0)).close()
            return address
    return own[0]


def _looked_up(address: str, deadline: Deadline) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, Target]:
    """Look up `address`, and retry until `deadline` while the host name is unknown.

    Kubernetes publishes the name of a pod only when the pod runs. Raises `RendezvousError` with the name."""
    where, port = split_address(address)
    while True:
        try:
            return socket.getaddrinfo(where, port, type=socket.SOCK_DGRAM)[0]
        except socket.gaierror as error:
            try:
                time.sleep(min(LOOKUP_PAUSE, deadline.remaining()))
            except TimeoutError as end:
                problem = f"the host name {where} has no address here ({error.strerror}): {end}"
                raise RendezvousError(
                    f"{problem}; look at the name, and at the DNS of this host", where=address
                ) from None
