"""Object store on this machine with the API of S3 or of a web server, which counts, delays and fails requests.

It supports the requests of readers: listings, HEAD, and GET with ranges and conditions."""

import hashlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PART = 1 << 18
_DATE = "Mon, 02 Nov 2026 10:00:00 GMT"


@dataclass(frozen=True)
class Request:
    """A request: its method ("LIST" for listings), its object, and the number of earlier requests of this kind."""

    method: str
    key: str
    before: int
    account: str = ""  # the access key of its signature


# Function that returns the fault of a request: a status, "reset", "cut" (half of the body), "expired", "trickle" (only
# the first line, byte by byte), or None for an answer.
Fault = Callable[[Request], int | str | None]


@dataclass
class ObjectStore:
    """Objects by "bucket/key". Each request takes `latency` seconds; a listing has pages of `page` objects.

    `bytes_per_second` limits all bodies together; 0 is no limit. `short` makes answers to ranges shorter
    than requested: "range" to half of the range, as HTTP allows, "closed" to half of the body, without its length,
    "empty" to nothing of it. `hidden` are headers that answers lack."""

    objects: dict[str, bytes]
    latency: float = 0.0
    bytes_per_second: float = 0.0
    page: int = 1000
    fault: Fault = lambda request: None
    requests: Counter[str] = field(default_factory=Counter)
    short: str = ""
    hidden: tuple[str, ...] = ()
    most_at_once: int = 0
    address: str = ""
    scheme: str = "http"

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._seen: Counter[tuple[str, str]] = Counter()
        self._sent_by = 0.0

    @classmethod
    @contextmanager
    def serving(
        cls,
        folder: Path,
        prefix: str = "bucket/data",
        latency: float = 0.0,
        bytes_per_second: float = 0.0,
        tls: ssl.SSLContext | None = None,
        handler: "type[Handler] | None" = None,
    ) -> Iterator["ObjectStore"]:
        """Serve the files of a folder below `prefix`, on a free port of this machine; `handler` has another API."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        store = cls(
            {f"{prefix}/{path.relative_to(folder)}": path.read_bytes() for path in files}, latency, bytes_per_second
        )

        connections: list[socket.socket] = []

        class Bound(handler or Handler):  # type: ignore[misc]
            objects = store

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True
            block_on_close = False

            def get_request(self) -> tuple[socket.socket, object]:
                opened, client = super().get_request()
                connections.append(opened)
                return opened, client

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore clients that close their connections."""

        server = Server(("127.0.0.1", 0), Bound)
        if tls is not None:  # the threads of the connections do the handshakes
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
            store.scheme = "https"
        store.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            for each in connections:
                with suppress(OSError):  # the client has closed it
                    each.shutdown(socket.SHUT_RDWR)
            close_web_sessions()

    @property
    def options(self) -> dict[str, object]:
        """Return the options of fsspec's s3 for this store."""
        return {
            "key": "keykey",
            "secret": "secretsecret",
            "client_kwargs": {"endpoint_url": f"{self.scheme}://{self.address}", "region_name": "us-east-1"},
        }

    def urls(self) -> list[str]:
        """Return the URLs of all objects as on a web server."""
        return [f"{self.scheme}://{self.address}/{key}" for key in sorted(self.objects)]

    @property
    def count(self) -> int:
        """Return the number of requests since the last `reset`."""
        return sum(self.requests.values())

    def reset(self) -> None:
        """Set the counters to 0."""
        self.requests.clear()
        self.most_at_once = 0

    @contextmanager
    def at_work(self, method: str, key: str, account: str) -> Iterator[int | str | None]:
        """Count and delay a request; yield its fault."""
        with self._lock:
            self.requests[method] += 1
            request = Request(method, key, self._seen[method, key], account)
            self._seen[method, key] += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            time.sleep(self.latency)
            yield self.fault(request)
        finally:
            with self._lock:
                self._now -= 1

    def listing(self, bucket: str, query: dict[str, str]) -> bytes:
        """Return the page of a listing for a request's query, as XML."""
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        names = sorted(key.split("/", 1)[1] for key in self.objects if key.startswith(f"{bucket}/"))
        found = [name for name in names if name.startswith(prefix) and name > after]
        delimiter = query.get("delimiter")
        folders: list[str] = []
        if delimiter:
            inner = [name[len(prefix) :] for name in found]
            folders = sorted({prefix + name.split(delimiter)[0] + delimiter for name in inner if delimiter in name})
            found = [name for name in found if delimiter not in name[len(prefix) :]]
        page = found[: min(self.page, int(query.get("max-keys", self.page)))]
        more = len(page) < len(found)
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-02T10:00:00.000Z</LastModified>"
            f"<ETag>{escape(mark_of(body))}</ETag><Size>{len(body)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name in page
            for body in [self.objects[f"{bucket}/{name}"]]
        )
        commons = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}{commons}"
            "</ListBucketResult>"
        ).encode()

    def slow_parts(self, body: bytes) -> Iterator[bytes]:
        """Yield a body in parts, as fast as `bytes_per_second` allows."""
        if not self.bytes_per_second:
            yield body
            return
        for first in range(0, len(body), _PART):
            part = body[first : first + _PART]
            with self._lock:
                self._sent_by = max(self._sent_by, time.monotonic()) + len(part) / self.bytes_per_second
                due = self._sent_by
            time.sleep(max(0.0, due - time.monotonic()))
            yield part


def close_web_sessions() -> None:
    """Close fsspec's connections to web servers and end its thread, which it would keep until the process ends."""
    from fsspec import asyn
    from fsspec.implementations.http import HTTPFileSystem

    loop, thread = asyn.loop[0], asyn.iothread[0]
    if loop is None:
        return

    async def close() -> None:
        for fs in HTTPFileSystem._cache.values():
            if fs._session is not None:
                await fs._session.close()

    asyn.sync(loop, close)
    HTTPFileSystem.clear_instance_cache()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    asyn.loop[0] = asyn.iothread[0] = None


class Handler(BaseHTTPRequestHandler):
    """Handler of requests as S3 and web servers have it."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    objects: ObjectStore

    def do_HEAD(self) -> None:
        self.answer("HEAD")

    def do_GET(self) -> None:
        self.answer("GET")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def answer(self, method: str) -> None:
        """Answer a request."""
        parts = urlsplit(self.path)
        key, query = unquote(parts.path).lstrip("/"), {name: each[0] for name, each in parse_qs(parts.query).items()}
        listing = "/" not in key.rstrip("/") and "list-type" in query
        account = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        with self.objects.at_work("LIST" if listing else method, key, account) as fault:
            if fault == "reset":
                self.close_connection = True
                self.connection.close()
            elif fault == "trickle":
                self._trickle()
            elif fault == "expired":
                self.send(400, {}, b"<Error><Code>ExpiredToken</Code><Message>The token has expired</Message></Error>")
            elif isinstance(fault, int):
                self.send(fault, {}, b"")
            elif listing:
                self.send(200, {"Content-Type": "application/xml"}, self.objects.listing(key.rstrip("/"), query))
            else:
                self._give(method, key, cut=fault == "cut")

    def _trickle(self) -> None:
        self.close_connection = True
        with suppress(OSError):  # the client has given up
            for byte in b"HTTP/1.1 206 Partial Content\r\n":
                self.connection.sendall(bytes([byte]))
                time.sleep(0.02)

    def _give(self, method: str, key: str, *, cut: bool) -> None:
        body = self.objects.objects.get(key)
        if body is None:
            return self.send(404, {}, b"")
        own = mark_of(body)
        headers = {"ETag": own}
        headers |= {"Last-Modified": _DATE, "Accept-Ranges": "bytes"}
        if self.headers.get("If-Match", own) != own:
            return self.send(412, headers, b"")
        status, asked = 200, self.headers.get("Range", "").removeprefix("bytes=")
        if asked:
            begin, _, end = asked.partition("-")
            first = int(begin) if begin else max(0, len(body) - int(end))
            last = min(len(body), int(end) + 1 if begin and end else len(body))
            if first >= len(body):
                return self.send(416, headers, b"")
            status, headers["Content-Range"] = 206, f"bytes {first}-{last - 1}/{len(body)}"
            body = body[first:last]
        self.send(status, headers, body, length=len(body), cut=len(body) // 2 if cut else None, head=method == "HEAD")
        return None

    def send(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes,
        length: int | None = None,
        cut: int | None = None,
        head: bool = False,
    ) -> None:
        short = self.objects.short if status == 206 else ""
        headers = {name: value for name, value in headers.items() if name not in self.objects.hidden}
        if short:
            body = b"" if short == "empty" else body[: (len(body) + 1) // 2]
            length, self.close_connection = len(body), short != "range"
        if short == "range":
            first, _, size = headers["Content-Range"].removeprefix("bytes ").replace("/", "-").split("-")
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{size}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if short in ("closed", "empty"):
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if not head:
            if self.objects.bytes_per_second:
                self.wfile.flush()  # send the head before the body
            for part in self.objects.slow_parts(body if cut is None else body[:cut]):
                self.wfile.write(part)
        self.wfile.flush()
        if cut is not None:
            self.close_connection = True
            self.connection.close()


_MARKS: dict[int, tuple[bytes, str]] = {}


def mark_of(body: bytes) -> str:
    """Return the object's ETag, computed once for each object."""
    known = _MARKS.get(id(body))
    if known is None or known[0] is not body:
        known = _MARKS[id(body)] = body, f'"{hashlib.md5(body).hexdigest()}"'
    return known[1]
