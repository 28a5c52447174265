"""Mutual proof that both ends of a connection know the job's secret, and frames on the connection.

Four messages; C connects, A accepts. || concatenates; in an HMAC's text each part is preceded by its length:

    C -> A   hello(C) = magic || nonce(C) || identity(C)
    A -> C   hello(A) || HMAC-SHA256(secret, "accepting"  || hello(C) || hello(A))
    C -> A               HMAC-SHA256(secret, "connecting" || hello(C) || hello(A))
    A -> C   welcome: A has admitted the connection. If the connection ends before, C may try again

Fresh nonces prevent replay, the two words prevent the reflection of a proof to its sender, and the proofs cover the
identities. Nothing on the connection is encrypted."""

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Generator
from datetime import timedelta
from typing import TypeAlias, TypeVar

from farandole.errors import AuthenticationError, ConfigError, RendezvousError

__all__ = [
    "Deadline",
    "Steps",
    "authenticate",
    "handshake_steps",
    "new_secret",
    "peer_name",
    "recv_exactly",
    "recv_frame",
    "send_frame",
]

MAGIC = b"farandole2\n"
WELCOME = b"!"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
HEAD_BYTES = len(MAGIC) + NONCE_BYTES + 1
FRAME_LENGTH = struct.Struct("!Q")
LEAST_SECRET = 16

T = TypeVar("T")

# A conversation without a socket: a generator that yields bytes to send, or the number of bytes that it needs next and
# is then sent. The blocking `authenticate` and the acceptor, which runs many handshakes at once, share it.
Steps: TypeAlias = Generator[int | bytes, bytes, T]


class Deadline:
    """A deadline that a sequence of waits shares."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout.total_seconds()

    def remaining(self) -> float:
        """Return the seconds left; raises `TimeoutError` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self.timeout.total_seconds():g} s")
        return left


def new_secret() -> bytes:
    """Make the secret of a job."""
    return secrets.token_bytes(32)


def peer_name(sock: socket.socket) -> str:
    """Return the address of the other end of `sock` for messages: "host:port"."""
    try:
        address = sock.getpeername()
    except OSError:
        return "a peer that is gone"
    if isinstance(address, tuple):
        return join_address(address[0], address[1])
    return "a local peer"


def join_address(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Parse "host:port"; raises `ConfigError` for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError("address", f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


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


def handshake_steps(secret: bytes, *, me: bytes, accept: bool, where: str) -> Steps[bytes]:
    """Run the handshake of `authenticate` as a conversation without a socket; return the peer's identity."""
    if len(secret) < LEAST_SECRET:
        raise ConfigError("secret", f"must be at least {LEAST_SECRET} bytes long, got {len(secret)}")
    if len(me) > 255:
        raise ConfigError("identity", f"must be at most 255 bytes long, got {len(me)}")
    mine = MAGIC + os.urandom(NONCE_BYTES) + bytes([len(me)]) + me
    if accept:
        theirs, identity = yield from _hello_of_peer(where)
        yield mine + _proof(secret, b"accepting", theirs, mine)
        expected = _proof(secret, b"connecting", theirs, mine)
    else:
        yield mine
        theirs, identity = yield from _hello_of_peer(where)
        expected = _proof(secret, b"accepting", mine, theirs)
    if not hmac.compare_digest(expected, (yield PROOF_BYTES)):
        raise AuthenticationError("it does not know this job's secret", where=where)
    if accept:
        yield WELCOME
    else:
        yield _proof(secret, b"connecting", mine, theirs)
        if (yield len(WELCOME)) != WELCOME:
            raise AuthenticationError("it does not speak farandole's protocol", where=where)
    return identity


def _hello_of_peer(where: str) -> Steps[tuple[bytes, bytes]]:
    head = yield HEAD_BYTES
    if not head.startswith(MAGIC):
        raise AuthenticationError("it does not speak farandole's protocol", where=where)
    identity = (yield head[-1]) if head[-1] else b""
    return head + identity, identity


def _proof(secret: bytes, role: bytes, *hellos: bytes) -> bytes:
    # Each part is preceded by its length, so that different conversations never give the same text.
    text = b"".join(len(part).to_bytes(4) + part for part in (role, *hellos))
    return hmac.digest(secret, text, "sha256")


def converse(sock: socket.socket, steps: Steps[T], deadline: Deadline) -> T:
    """Run the conversation `steps` over `sock` and return its result.

    Blocks up to `deadline`; raises the conversation's errors, `TimeoutError`, other `OSError`s of the socket, and
    `EOFError` if the peer ends the connection."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, int):
                step = steps.send(recv_exactly(sock, step, deadline))
            else:
                sock.settimeout(deadline.remaining())
                sock.sendall(step)
                step = next(steps)
    except StopIteration as done:
        result: T = done.value
        return result


def send_frame(sock: socket.socket, payload: bytes, *, deadline: Deadline | None = None) -> None:
    """Send `payload` with its length before it.

    Blocks until the kernel has taken all of it, up to `deadline` (which becomes the socket's timeout), or without one
    up to the socket's own timeout. Then raises `TimeoutError`; raises `ConnectionError` if the peer is gone."""
    if deadline is not None:
        sock.settimeout(deadline.remaining())
    sock.sendall(FRAME_LENGTH.pack(len(payload)))
    sock.sendall(payload)


def recv_frame(sock: socket.socket, limit: int, *, deadline: Deadline | None = None) -> bytes:
    """Receive the frame of one `send_frame`, at most `limit` bytes.

    Blocks until it is complete, up to `deadline`, or without one each piece up to the socket's own timeout. Then raises
    `TimeoutError`; raises `EOFError` if the peer ends the connection first, and `RendezvousError`, before anything is
    allocated, for a frame over the limit."""
    (length,) = FRAME_LENGTH.unpack(recv_exactly(sock, FRAME_LENGTH.size, deadline))
    if length > limit:
        raise RendezvousError(f"a frame of {length} bytes is over the limit of {limit}", where=peer_name(sock))
    return recv_exactly(sock, length, deadline)


def recv_exactly(sock: socket.socket, count: int, deadline: Deadline | None) -> bytes:
    """Receive `count` bytes; raises `EOFError` if the peer ends the connection first, see `recv_frame`."""
    buffer = bytearray(count)
    with memoryview(buffer) as view:
        got = 0
        while got < count:
            if deadline is not None:
                sock.settimeout(deadline.remaining())
            more = sock.recv_into(view[got:])
            if more == 0:
                raise EOFError(f"the connection ended after {got} of {count} bytes")
            got += more
    return bytes(buffer)
