"""The part of Google Cloud Storage's JSON API that readers use: listings, metadata, and media with conditions."""

import json
import zlib
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from helpers.object_store import Handler

_BUCKETS = "/storage/v1/b/"


class GoogleHandler(Handler):
    """Handler of requests as Google's store has it; an object's generation is a checksum of its content."""

    def answer(self, method: str) -> None:
        """Answer a request."""
        parts = urlsplit(self.path)
        query = {name: each[0] for name, each in parse_qs(parts.query).items()}
        bucket, _, quoted = parts.path.partition(_BUCKETS)[2].partition("/o")
        key, media = f"{unquote(bucket)}{unquote(quoted)}", query.get("alt") == "media"
        kind = "GET" if media else "HEAD" if quoted else "LIST"
        with self.objects.at_work(kind, key, "") as fault:
            body = self.objects.objects.get(key)
            if isinstance(fault, int):
                self.send(fault, {}, b"")
            elif kind == "LIST":
                self._send_json(self._page(unquote(bucket), query))
            elif body is None:
                self.send(404, {}, b"")
            elif kind == "HEAD":
                self._send_json(_facts(key.partition("/")[2], body))
            elif query.get("ifGenerationMatch", _generation(body)) != _generation(body):
                self.send(412, {}, b"")
            else:
                self._media(body, cut=fault == "cut")

    def _media(self, body: bytes, *, cut: bool) -> None:
        begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        first = int(begin) if begin else max(0, len(body) - int(end))
        last = min(len(body), int(end) + 1 if begin else len(body))
        if first >= last:
            return self.send(416, {}, b"")
        headers = {"Content-Range": f"bytes {first}-{last - 1}/{len(body)}", "x-goog-generation": _generation(body)}
        part = body[first:last]
        return self.send(206, headers, part, length=len(part), cut=len(part) // 2 if cut else None)

    def _page(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        names = sorted(key.partition("/")[2] for key in self.objects.objects if key.startswith(f"{bucket}/"))
        after = query.get("pageToken", "")
        found = [name for name in names if name.startswith(query.get("prefix", "")) and name > after]
        page = found[: self.objects.page]
        items = [_facts(name, self.objects.objects[f"{bucket}/{name}"]) for name in page]
        return {"items": items} | ({"nextPageToken": page[-1]} if len(page) < len(found) else {})

    def _send_json(self, content: dict[str, Any]) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())


def _facts(name: str, body: bytes) -> dict[str, str]:
    return {"name": name, "size": str(len(body)), "generation": _generation(body)}


def _generation(body: bytes) -> str:
    return str(zlib.crc32(body) + 1)
