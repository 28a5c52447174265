"""The part of Azure's Blob service that readers use: listings, properties, and ranges with conditions."""

from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from helpers.object_store import Handler, mark_of

_DATE = "Mon, 02 Nov 2026 10:00:00 GMT"
ACCOUNT = "devstoreaccount1"


class AzureHandler(Handler):
    """Handler of requests as Azure's store has it, below the name of an account."""

    def answer(self, method: str) -> None:
        """Answer a request."""
        parts = urlsplit(self.path)
        query = {name: each[0] for name, each in parse_qs(parts.query).items()}
        key = unquote(parts.path).removeprefix(f"/{ACCOUNT}/")
        kind = "LIST" if query.get("comp") == "list" else method
        with self.objects.at_work(kind, key, "") as fault:
            body = self.objects.objects.get(key)
            if isinstance(fault, int):
                self.send(fault, {"x-ms-error-code": "Fault"}, b"")
            elif kind == "LIST":
                self.send(200, {"Content-Type": "application/xml"}, self._page(key, query))
            elif body is None:
                self.send(404, {"x-ms-error-code": "BlobNotFound"}, b"")
            elif self.headers.get("If-Match", mark_of(body)) != mark_of(body):
                self.send(412, {"x-ms-error-code": "ConditionNotMet"}, b"")
            else:
                self._give(method, body, cut=fault == "cut")

    def _give(self, method: str, body: bytes, *, cut: bool) -> None:  # type: ignore[override]
        headers = {"ETag": mark_of(body), "Last-Modified": _DATE, "x-ms-blob-type": "BlockBlob", "x-ms-version": "1"}
        if method == "HEAD":
            return self.send(200, headers, b"", length=len(body), head=True)
        asked = self.headers.get("x-ms-range", self.headers.get("Range", "bytes=0-")).removeprefix("bytes=")
        begin, _, end = asked.partition("-")
        first, last = int(begin), min(len(body), int(end) + 1 if end else len(body))
        if first >= last:
            return self.send(416, {"x-ms-error-code": "InvalidRange"}, b"")
        headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(body)}"
        part = body[first:last]
        return self.send(206, headers, part, length=len(part), cut=len(part) // 2 if cut else None)

    def _page(self, container: str, query: dict[str, str]) -> bytes:
        names = sorted(key.partition("/")[2] for key in self.objects.objects if key.startswith(f"{container}/"))
        after = query.get("marker", "")
        found = [name for name in names if name.startswith(query.get("prefix", "")) and name > after]
        page = found[: self.objects.page]
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
            f"<Etag>{mark_of(body).strip(chr(34))}</Etag><Content-Length>{len(body)}</Content-Length>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in page
            for body in [self.objects.objects[f"{container}/{name}"]]
        )
        more = escape(page[-1]) if len(page) < len(found) else ""
        listing = f"<Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker>"
        return f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults>{listing}</EnumerationResults>'.encode()
