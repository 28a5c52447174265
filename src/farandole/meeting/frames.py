"""Frames and typed messages on connections.

A frame is a payload with its length in front. A message is a dataclass. Its fields are numbers, strings, flags, None,
lists and dictionaries of these, further dataclasses, or, at the top, bytes and lists of bytes. Its payload has a head
of JSON, with the name of its class, and then the bytes. Reading it runs no code of the sender, but a peer must prove
the job's secret (`handshake.py`) before anything is read from it."""

import dataclasses
import functools
import json
import socket
import struct
import time
import types
import typing
from collections.abc import Generator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from farandole.errors import RendezvousError
from farandole.meeting.addresses import peer_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LENGTH = struct.Struct("!Q")
HEAD = 1 << 16  # bytes; more than a message of a few fields, of which two may be paths as long as Linux allows

T = TypeVar("T")
M = TypeVar("M")

# A conversation without a socket: a generator that yields bytes to send, or the number of bytes that it needs next and
# is then sent. Blocking callers, and servers of many connections at once, share it.
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


def encode(message: "DataclassInstance") -> bytes:
    """Return the bytes of `message`; raises `TypeError` for values that JSON does not know."""
    plain: dict[str, object] = {}
    sizes: dict[str, object] = {}
    parts: list[bytes] = []
    for each in dataclasses.fields(message):
        value = getattr(message, each.name)
        if isinstance(value, bytes):
            sizes[each.name] = len(value)
            parts.append(value)
        elif isinstance(value, list) and value and isinstance(value[0], bytes):
            sizes[each.name] = [len(part) for part in value]
            parts += value
        else:
            plain[each.name] = value
    head = json.dumps([type(message).__name__, plain, sizes], default=_fields_of).encode()
    return b"".join((LENGTH.pack(len(head)), head, *parts))


class Kinds(Generic[M]):
    """The classes of the messages that one end of a connection may send: `Kinds[A | B](A, B)`."""

    def __init__(self, *kinds: type[M]) -> None:
        self._kinds = {each.__name__: each for each in kinds}

    def decode(self, payload: bytes) -> M:
        """Return the message whose bytes `payload` is; raises `ValueError` if it is of no such class."""
        try:
            name, fields, sizes, body = _head(payload)
            parts = _Parts(payload, body)
            for key, size in sizes.items():
                fields[key] = list(map(parts.take, size)) if isinstance(size, list) else parts.take(size)
            parts.require_end()
            message: M = _typed(fields, self._kinds[name])
        except (struct.error, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"it is no message {' or '.join(self._kinds)} ({error})") from error
        return message

    def receive(self, sock: socket.socket, *, limit: int = HEAD, deadline: Deadline | None = None) -> M:
        """Receive a message of at most `limit` bytes.

        Blocks and raises as `recv_frame` does; raises `ValueError` for a message of another class."""
        return self.decode(recv_frame(sock, limit, deadline=deadline))


def plain_fields(payload: bytes) -> Mapping[str, object]:
    """Return the fields but bytes of a message of any class, known here or not; none if `payload` is no message."""
    try:
        fields = _head(payload)[1]
    except (struct.error, TypeError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _head(payload: bytes) -> tuple[str, dict[str, object], Mapping[str, int | list[int]], int]:
    """Return the class, the fields and the sizes of bytes that the head names, and the place of the first of these."""
    body = LENGTH.size + LENGTH.unpack_from(payload)[0]
    name, fields, sizes = json.loads(payload[LENGTH.size : body])
    return name, fields, sizes, body


def decode(payload: bytes, kind: type[M]) -> M:
    """Return the message of class `kind` whose bytes `payload` is; raises `ValueError` for another one."""
    return Kinds(kind).decode(payload)


class _Parts:
    """The bytes after the head of a message."""

    def __init__(self, payload: bytes, at: int) -> None:
        self._payload, self._at = payload, at

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if not 0 <= size <= len(self._payload) - self._at:
            raise ValueError(f"{size} bytes are not there")
        self._at += size
        return self._payload[self._at - size : self._at]

    def require_end(self) -> None:
        """Raise `ValueError` unless all bytes are taken."""
        if self._at != len(self._payload):
            raise ValueError(f"it has {len(self._payload)} bytes, but its fields end at {self._at}")


def _fields_of(value: object) -> dict[str, object]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"a message cannot have a {type(value).__name__}")
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


@functools.cache
def _hints(kind: object) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _typed(value: typing.Any, hint: typing.Any) -> typing.Any:
    """Return `value`, made of JSON, as the type `hint`; raises `TypeError` if it is of another one."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    is_message: bool = dataclasses.is_dataclass(hint)
    if is_message and isinstance(value, dict):
        hints = _hints(hint)
        return hint(**{name: _typed(each, hints[name]) for name, each in value.items()})
    if origin in (typing.Union, types.UnionType):
        return value if value is None else _typed(value, next(each for each in arguments if each is not type(None)))
    if origin is float and type(value) is int:
        return float(value)
    wanted = dict if origin is Mapping else origin
    if wanted is not object and (not isinstance(value, wanted) or (type(value) is bool and wanted is not bool)):
        raise TypeError(f"{value!r:.80} is no {origin.__name__}")
    if wanted is list and arguments:
        return [_typed(each, arguments[0]) for each in value]
    if wanted is dict and arguments:
        return {key: _typed(each, arguments[1]) for key, each in value.items()}
    return value


def frame(payload: bytes) -> bytes:
    """Return `payload` with its length in front."""
    return LENGTH.pack(len(payload)) + payload


def split_frames(joined: memoryview) -> list[memoryview]:
    """Split joined frames into their payloads; raises `ValueError` if the last one is cut short."""
    parts = []
    start = 0
    while start < len(joined):
        body = start + LENGTH.size
        end = body + int.from_bytes(joined[start:body])
        if end > len(joined):
            raise ValueError("a frame is longer than what arrived")
        parts.append(joined[body:end])
        start = end
    return parts


def send(sock: socket.socket, message: "DataclassInstance", *, deadline: Deadline | None = None) -> None:
    """Send a message as one frame; blocks and raises as `send_frame` does."""
    if deadline is not None:
        sock.settimeout(deadline.remaining())
    sock.sendall(frame(encode(message)))


def send_frame(sock: socket.socket, payload: bytes, *, deadline: Deadline | None = None) -> None:
    """Send `payload` with its length before it.

    Blocks until the kernel has taken all of it, up to `deadline` (which becomes the socket's timeout), or without one
    up to the socket's own timeout. Then raises `TimeoutError`; raises `ConnectionError` if the peer is gone."""
    if deadline is not None:
        sock.settimeout(deadline.remaining())
    sock.sendall(LENGTH.pack(len(payload)))
    sock.sendall(payload)


def recv_frame(sock: socket.socket, limit: int, *, deadline: Deadline | None = None) -> bytes:
    """Receive the frame of one `send_frame`, at most `limit` bytes.

    Blocks until it is complete, up to `deadline`, or without one each piece up to the socket's own timeout. Then raises
    `TimeoutError`; raises `EOFError` if the peer ends the connection first, and `RendezvousError`, before anything is
    allocated, for a frame over the limit."""
    return converse(sock, frame_steps(limit, peer_name(sock)), deadline)


def frame_steps(limit: int, where: str) -> Steps[bytes]:
    """Read a frame of at most `limit` bytes from the peer at `where`, as a conversation without a socket."""
    (length,) = LENGTH.unpack((yield LENGTH.size))
    if length > limit:
        raise RendezvousError(f"a frame of {length} bytes is over the limit of {limit}", where=where)
    return (yield length) if length else b""


def converse(sock: socket.socket, steps: Steps[T], deadline: Deadline | None) -> T:
    """Run the conversation `steps` over `sock` and return its result.

    Blocks up to `deadline`, or without one in each step up to the socket's own timeout; raises the conversation's
    errors, `TimeoutError`, other `OSError`s of the socket, and `EOFError` if the peer ends the connection."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, int):
                step = steps.send(recv_exactly(sock, step, deadline))
            else:
                if deadline is not None:
                    sock.settimeout(deadline.remaining())
                sock.sendall(step)
                step = next(steps)
    except StopIteration as done:
        result: T = done.value
        return result


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
