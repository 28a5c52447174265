"""Listeners of a rank while it connects to its peers."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from farandole.errors import ConfigError
from farandole.meeting.acceptor import BACKLOG, listen


@contextmanager
def listen_tcp(address: str) -> Iterator[socket.socket]:
    """Listen at a free port of `address`; raises `ConfigError` if this host cannot listen there."""
    try:
        listener = listen(address)
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        problem = f"this rank cannot listen on {address} ({os.strerror(error.errno or 0)}); name one of {names}"
        raise ConfigError("interface", problem) from error
    with listener:
        yield listener


@contextmanager
def listen_unix() -> Iterator[socket.socket]:
    """Listen at a free name in the abstract namespace of Unix sockets."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("")  # Linux picks a free abstract name
        listener.listen(BACKLOG)
        yield listener


def unix_name(listener: socket.socket) -> str:
    """Return the name of `listener` as text."""
    name: bytes = listener.getsockname()
    return name.hex()
