"""Outgoing connections to members of the job, with retries while strangers crowd the listener."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from farandole.errors import AuthenticationError
from farandole.meeting.acceptor import same_user
from farandole.meeting.addresses import split_address
from farandole.meeting.frames import Deadline, Steps, recv_exactly
from farandole.meeting.handshake import handshake_steps

FIRST_LIMIT = 2.0  # seconds for the first handshake; doubled after an attempt without an answer
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 1.0  # seconds between two attempts


def dial(
    address: str | bytes,
    secret: bytes,
    *,
    me: bytes,
    deadline: Deadline,
    patient: bool = False,
    wait: Callable[[float], object] = time.sleep,
) -> tuple[socket.socket, bytes]:
    """Connect to `address`, authenticate both ends, and return the connection and the peer's identity.

    `address` is "host:port", or the name of a Unix socket. Retries when the backlog is full, and when a handshake
    breaks off or gets no answer; with `patient` after every `OSError`, also when the connection is refused or the host
    name has no address. Calls `wait(seconds)` between two attempts. Blocks up to `deadline`. Raises
    `AuthenticationError` if the peer does not know the secret, `TimeoutError` with the latest problem, or, unless
    `patient`, the `OSError` of an address without a listener."""
    pause, limit, problem = FIRST_PAUSE, FIRST_LIMIT, ""
    while True:
        try:
            left = deadline.remaining()
        except TimeoutError as error:
            if not problem:
                raise
            raise TimeoutError(f"{error}: {problem}") from error
        try:
            return _attempt(address, secret, me, Deadline(timedelta(seconds=min(limit, left))), deadline)
        except (BlockingIOError, EOFError, TimeoutError) as error:
            problem, limit = str(error), 2 * limit
        except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError) as error:
            problem = str(error)
        except OSError as error:
            if not patient:
                raise
            problem = str(error)
        wait(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)


def _attempt(
    address: str | bytes, secret: bytes, me: bytes, attempt: Deadline, deadline: Deadline
) -> tuple[socket.socket, bytes]:
    where = address if isinstance(address, str) else "a local peer"
    sock = _connected(address, attempt)
    try:
        identity = _prove(sock, handshake_steps(secret, me=me, accept=False, where=where), attempt, deadline)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock, identity


def _connected(address: str | bytes, attempt: Deadline) -> socket.socket:
    if isinstance(address, str):
        host, port = split_address(address)
        try:
            sock = socket.create_connection((host, port), timeout=attempt.remaining())
        except socket.gaierror as error:
            raise OSError(f"the host name {host} has no address here ({error.strerror})") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(attempt.remaining())
        sock.connect(address)
        if not same_user(sock):
            raise AuthenticationError("it belongs to another user", where="a local peer")
    except BaseException:
        sock.close()
        raise
    return sock


def _prove(sock: socket.socket, steps: Steps[bytes], attempt: Deadline, deadline: Deadline) -> bytes:
    """Run the handshake `steps`; wait for the peer's last message until `deadline`, for the others until `attempt`.

    At the last message the peer may have admitted this connection. Another attempt would leave it a dead one."""
    sent, step = 0, next(steps)
    try:
        while True:
            if isinstance(step, bytes):
                sock.settimeout(attempt.remaining())
                sock.sendall(step)
                sent, step = sent + 1, next(steps)
            else:
                step = steps.send(recv_exactly(sock, step, attempt if sent < 2 else deadline))
    except StopIteration as done:
        identity: bytes = done.value
        return identity
