"""Handshake over a socket, for tests that speak the protocol themselves."""

import socket
from datetime import timedelta

from farandole.errors import AuthenticationError
from farandole.meeting.addresses import peer_name
from farandole.meeting.frames import Deadline, converse
from farandole.meeting.handshake import handshake_steps


def authenticate(sock: socket.socket, secret: bytes, *, me: bytes, accept: bool, timeout: timedelta) -> bytes:
    """Prove to the other end of `sock` that we know `secret`, verify the peer's proof, and return the peer's identity.

    `me` is this end's identity. `accept` is true at the end that accepted the connection. Blocks up to `timeout` and
    restores the socket's own timeout. The proofs cover the identities. Raises `AuthenticationError` naming the peer's
    address; then the caller closes the socket."""
    where = peer_name(sock)
    before = sock.gettimeout()
    try:
        return converse(sock, handshake_steps(secret, me=me, accept=accept, where=where), Deadline(timeout))
    except (OSError, EOFError) as error:
        raise AuthenticationError(f"it broke off the handshake ({error})", where=where) from error
    finally:
        sock.settimeout(before)
