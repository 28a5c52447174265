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

from farandole.errors import AuthenticationError, ConfigError
from farandole.meeting.frames import Steps

MAGIC = b"farandole2\n"
WELCOME = b"!"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
HEAD_BYTES = len(MAGIC) + NONCE_BYTES + 1
LEAST_SECRET = 16


def new_secret() -> bytes:
    """Make the secret of a job."""
    return secrets.token_bytes(32)


def handshake_steps(secret: bytes, *, me: bytes, accept: bool, where: str) -> Steps[bytes]:
    """Prove to the other end that we know `secret`, verify its proof, and return its identity.

    A conversation without a socket. `me` is this end's identity, `accept` is true at the end that accepted the
    connection, and `where` is the other end in errors. Raises `AuthenticationError`; then the connection is closed."""
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
