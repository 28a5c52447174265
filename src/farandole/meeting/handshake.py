"""Mutual proof that both ends of a connection know the job's secret.

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
from datetime import timedelta

from farandole.errors import AuthenticationError, ConfigError
from farandole.meeting.addresses import peer_name
from farandole.meeting.frames import Deadline, Steps, converse

__all__ = ["authenticate", "handshake_steps", "new_secret"]

MAGIC = b"farandole2\n"
WELCOME = b"!"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
HEAD_BYTES = len(MAGIC) + NONCE_BYTES + 1
LEAST_SECRET = 16


def new_secret() -> bytes:
    """Make the secret of a job."""
    return secrets.token_bytes(32)


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
