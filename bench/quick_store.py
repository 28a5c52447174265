"""Object store for benchmarks that takes little processor time per request and serves small objects from memory."""

import hashlib
import selectors
import socket
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, unquote

from helpers.object_store import ObjectStore, mark_of

_MOST = 1 << 16  # bytes of a request
_TICK = 0.25  # seconds between looks at `closing`


class QuickStore:
    """Server of listings, HEAD, and GET with ranges and conditions, each answered after `latency` seconds.

    One thread serves all requests: all answers wait equally long, so the next due answer is the first of a queue."""

    def __init__(self, folder: Path, prefix: str, latency: float) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self._store = ObjectStore({f"{prefix}/{path.relative_to(folder)}": path.read_bytes() for path in files})
        self._heads = {key: _head_of(body) for key, body in self._store.objects.items()}
        self._latency = latency
        self._waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.closing = False
        self.count = self.most_at_once = 0

    @property
    def options(self) -> dict[str, object]:
        """Return the options of fsspec's s3 for this store."""
        self._store.address = self.address
        return self._store.options

    def reset(self) -> None:
        """Set the counters to 0."""
        self.count = self.most_at_once = 0

    def serve(self) -> None:
        """Serve requests until `closing` is set."""
        with selectors.EpollSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while not self.closing:
                for key, _ in ready.select(self._until_due()):
                    if key.fileobj is self._listener:
                        opened, _ = self._listener.accept()
                        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        ready.register(opened, selectors.EVENT_READ)
                    else:
                        self._receive(key.fileobj, ready)  # type: ignore[arg-type]
                self._answer()
            for key in list(ready.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _until_due(self) -> float:
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else _TICK

    def _receive(self, opened: socket.socket, ready: selectors.EpollSelector) -> None:
        """Read a request and queue its answer. A client sends its next request only after the answer."""
        try:
            asked = opened.recv(_MOST)
        except ConnectionError:
            asked = b""
        if not asked:
            ready.unregister(opened)
            opened.close()
            return
        while not asked.endswith(b"\r\n\r\n"):
            asked += opened.recv(_MOST)
        self._waiting.append((time.monotonic() + self._latency, opened, self._answer_to(asked)))
        self.count += 1
        self.most_at_once = max(self.most_at_once, len(self._waiting))

    def _answer(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, opened, answer = self._waiting.popleft()
            with suppress(OSError):  # the client has closed the connection
                opened.sendall(answer)

    def _answer_to(self, asked: bytes) -> bytes:
        method, target, _ = asked.split(b" ", 2)
        path, _, query = target.decode().partition("?")
        key = unquote(path[1:])
        if "list-type" in query:
            page = self._store.listing(key.rstrip("/"), {name: each[0] for name, each in parse_qs(query).items()})
            return _answer_of(b"200 OK", b"Content-Type: application/xml\r\n", page)
        body = self._store.objects.get(key)
        if body is None:
            return _answer_of(b"404 Not Found", b"", b"")
        head, lower = self._heads[key], asked.lower()
        if method == b"HEAD":
            return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n" % (head, len(body))
        if (mark := _header(lower, b"if-match")) and mark.decode() != mark_of(body):
            return _answer_of(b"412 Precondition Failed", head, b"")
        span = _header(lower, b"range").removeprefix(b"bytes=")
        if not span:
            return _answer_of(b"200 OK", head, body)
        begin, _, end = span.partition(b"-")
        first = int(begin) if begin else max(0, len(body) - int(end))
        last = min(len(body), int(end) + 1 if begin and end else len(body))
        content_range = b"Content-Range: bytes %d-%d/%d\r\n" % (first, last - 1, len(body))
        return _answer_of(b"206 Partial Content", head + content_range, body[first:last])


def _head_of(body: bytes) -> bytes:
    mark = hashlib.md5(body).hexdigest()
    return f'ETag: "{mark}"\r\nLast-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\nAccept-Ranges: bytes\r\n'.encode()


def _answer_of(status: bytes, head: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, head, len(body), body)


def _header(lower: bytes, name: bytes) -> bytes:
    """Return the value of header `name` of a request in lower case, or b"" if it has none."""
    _, found, rest = lower.partition(b"\r\n%b:" % name)
    return rest.partition(b"\r\n")[0].strip() if found else b""
