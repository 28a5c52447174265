"""Addresses of TCP sockets as text: "host:port"."""

import socket

from farandole.errors import ConfigError


def join_address(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Parse "host:port"; raises `ConfigError` for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError("address", f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def peer_name(sock: socket.socket) -> str:
    """Return the address of the other end of `sock` for messages: "host:port"."""
    try:
        address = sock.getpeername()
    except OSError:
        return "a peer that is gone"
    if isinstance(address, tuple):
        return join_address(address[0], address[1])
    return "a local peer"
