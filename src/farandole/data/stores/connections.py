"""GET requests over connections that are kept open, at less cost per request than general HTTP clients."""

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from farandole.data.stores.responses import Response
from farandole.errors import ConfigError

_LONGEST_HEAD, _MOST_HEADERS = 64 << 10, 256
_MOST_CHUNKS = 1 << 20
_NO_BODY = {204, 304}
# Bytes per second that a head or body must have once the timeout for bytes has passed. Otherwise a server that sends
# single bytes would restart the socket's timeout with each of them.
LEAST_PER_SECOND = 4096
_MOST_AT_ONCE = 1 << 20  # bytes


class BadResponse(OSError):
    """The server's answer is not HTTP/1.1, or has fewer bytes than it announced."""


class _Closed(BadResponse):
    """The server closed the connection before it sent a byte of the answer."""


class Connections:
    """GET requests to servers, from any thread. A connection is kept for the next request to the same server.

    `timeout` is the seconds to connect and the seconds to wait for bytes. `bundle` is a file or folder of certificates
    to trust; with None, certificates are not verified. Keeps at most `most` connections per server."""

    def __init__(self, *, bundle: str | None, timeout: tuple[float, float], most: int) -> None:
        self._bundle, self._timeout, self._most = bundle, timeout, most
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str], list[_Connection]] = {}
        self._closed = False

    def get(
        self, server: str, target: str, headers: Mapping[str, str], on_head: Callable[[], None] = lambda: None
    ) -> Response:
        """Request a target ("/bucket/key") from a server ("https://host:port"); blocks until the response has arrived.

        Calls `on_head` when its head has arrived. Headers must be ASCII. Raises `OSError`, and `ConfigError` if the
        file of certificates cannot be read."""
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request = f"GET {target} HTTP/1.1\r\nHost: {urlsplit(server).netloc}\r\n{head}\r\n".encode("ascii")
        while True:
            connection = self._take(server)
            used = connection.used
            try:
                connection.socket.sendall(request)
                status, received = connection.head()
                break
            except (_Closed, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                connection.close()
                if not used:  # the server may have closed a kept connection for its age, but not a new one
                    raise
            except BaseException:
                connection.close()
                raise
        on_head()
        return Response(status, received, connection.body(status, received))

    def close(self) -> None:
        """Close the kept connections; later ones are closed after their answer."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, {}
        for connections in kept.values():
            for connection in connections:
                connection.close()

    def keep(self, connection: "_Connection") -> None:
        """Keep a connection whose answer has been read to its end."""
        with self._lock:
            kept = self._kept.setdefault((os.getpid(), connection.server), [])
            if len(kept) < self._most and not self._closed:
                kept.append(connection)
                return
        connection.close()

    def _take(self, server: str) -> "_Connection":
        with self._lock:
            # A forked process must not use its parent's connections, as each would read the other's answers.
            kept = self._kept.get((os.getpid(), server))
            if kept:
                return kept.pop()  # used last, so least likely to have been closed by the server
        return _Connection(self, server, self._open(server), self._timeout[1])

    def _open(self, server: str) -> socket.socket:
        parts = urlsplit(server)
        host, (patience, reading) = parts.hostname or "", self._timeout
        secure = parts.scheme == "https"
        opened = socket.create_connection((host, parts.port or (443 if secure else 80)), patience)
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secure:
                opened = self._trusting().wrap_socket(opened, server_hostname=host)
        except BaseException:
            opened.close()
            raise
        opened.settimeout(reading)
        return opened

    def _trusting(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:  # made once: reading the certificates is slow
                self._context = _context_of(self._bundle)
            return self._context


def _context_of(bundle: str | None) -> ssl.SSLContext:
    if bundle is None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    folder = os.path.isdir(bundle)
    try:
        return ssl.create_default_context(cafile=None if folder else bundle, capath=bundle if folder else None)
    except OSError as error:
        advice = "it is named by the option 'verify', AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE or ca_bundle of the profile"
        raise ConfigError("verify", f"no certificates can be read from {bundle}: {error}; {advice}") from error


class _Connection:
    """A connection to a server, used by one thread at a time."""

    def __init__(self, owner: Connections, server: str, opened: socket.socket, patience: float) -> None:
        self._owner, self.server, self.socket, self._patience = owner, server, opened, patience
        self._rest = b""  # bytes that were received and not yet consumed
        self._begin()
        self.used = False

    def close(self) -> None:
        self.socket.close()

    def head(self) -> tuple[int, dict[str, str]]:
        """Read the head of an answer."""
        self._begin()
        status = 100
        while 100 <= status < 200:  # interim answers, before the final one
            status, headers = self._one_head()
        self.used = True
        return status, headers

    def body(self, status: int, headers: Mapping[str, str]) -> bytes:
        """Read the body of an answer; then keep the connection, or close it if it cannot be used again."""
        self._begin()
        length = headers.get("content-length")
        try:
            if status in _NO_BODY:
                data, length = b"", "0"
            elif headers.get("transfer-encoding", "identity").lower() != "identity":
                data, length = self._chunks(), "known"
            else:
                data = self._until_closed() if length is None else self._exactly(int(length))
        except ValueError as error:
            self.close()
            raise BadResponse(f"a length in the answer is no number: {error}") from error
        except BaseException:
            self.close()
            raise
        if length is not None and not self._rest and headers.get("connection", "").lower() != "close":
            self._owner.keep(self)
        else:
            self.close()
        return data

    def _chunks(self) -> bytes:
        parts: list[bytes] = []
        for _ in range(_MOST_CHUNKS):
            size = int(self._until(b"\r\n", "line").partition(b";")[0], 16)
            if not size:
                while self._until(b"\r\n", "line"):  # trailers
                    pass
                return b"".join(parts)
            parts.append(self._exactly(size))
            self._until(b"\r\n", "line")
        raise BadResponse("the body has too many chunks")

    def _exactly(self, length: int) -> bytes:
        part, self._rest = self._rest[:length], self._rest[length:]
        left = length - len(part)
        if not left:
            return part
        parts = [part]
        while left:
            part = self._receive(min(left, _MOST_AT_ONCE))
            if not part:
                raise BadResponse(f"the body is {left} bytes short")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _until_closed(self) -> bytes:
        parts = [self._rest]
        while part := self._receive(_MOST_AT_ONCE):
            parts.append(part)
        return b"".join(parts)

    def _one_head(self) -> tuple[int, dict[str, str]]:
        lines = self._until(b"\r\n\r\n", "head", begin=b"HTTP/1.").decode("latin-1").split("\r\n")
        if len(lines) > _MOST_HEADERS:
            raise BadResponse("the answer has too many headers")
        status = lines[0].partition(" ")[2][:3]
        if not (status.isascii() and status.isdigit()):
            raise BadResponse(f"the answer begins with {lines[0][:40]!r}")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return int(status), headers

    def _until(self, end: bytes, what: str, begin: bytes = b"") -> bytes:
        """Read up to `end`, and return the bytes before it, which must begin with `begin`; errors call them `what`."""
        data = self._rest
        while True:
            if data[: len(begin)] != begin[: len(data)]:
                raise BadResponse(f"the answer begins with {data[:40]!r}")
            if (place := data.find(end)) >= 0:
                break
            if len(data) > _LONGEST_HEAD:
                raise BadResponse(f"a {what} of the answer is too long")
            more = self._receive(_LONGEST_HEAD)
            if not more and begin and not data:
                raise _Closed("the server closed the connection without an answer")
            if not more:
                raise BadResponse(f"a {what} of the answer is cut")
            data += more
        self._rest = data[place + len(end) :]
        return data[:place]

    def _begin(self) -> None:
        self._came, self._deadline = 0, time.monotonic() + self._patience

    def _receive(self, most: int) -> bytes:
        """Wait for bytes and return them, b"" when the server has closed the connection; raises `TimeoutError`.

        Once the patience has passed, raises it also if fewer than `LEAST_PER_SECOND` bytes per second arrive."""
        if self._came and time.monotonic() > self._deadline + self._came / LEAST_PER_SECOND:
            raise TimeoutError(f"only {self._came} bytes have come within {self._patience:g} s")
        data = self.socket.recv(most)
        self._came += len(data)
        return data
