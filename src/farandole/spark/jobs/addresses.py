"""Addresses at which others reach this machine, and keepalive of connections."""

import contextlib
import socket
from datetime import timedelta


def bindable_address(host: str) -> str:
    """Return the IP address of `host` if this machine has it, else ""."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return ""


def address_toward(host: str, port: int) -> str:
    """Return the address of this machine on the route to `host`; sends nothing. Raises `OSError` without a route."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def keep_alive(connection: socket.socket, patience: timedelta) -> None:
    """Make the kernel end an idle TCP connection whose peer's machine has been gone for about `patience`."""
    seconds = max(1, int(patience.total_seconds()) // 4)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
