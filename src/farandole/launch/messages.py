"""Messages between a launcher and its agent on another host, over a pair of pipes such as those of ssh.

The agent writes MARKER first, because a login shell may print other text before. A message is two lengths, a JSON array
of its kind and its fields, and bytes.

    agent -> launcher    hello (once), port, reached, line, end, gone
    launcher -> agent    reserve, reach, start, terminate
    both                 alive, every few seconds
"""

import contextlib
import json
import os
import select
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["MARKER", "SILENCE", "Message", "Messages"]

MARKER = b"\n--- farandole agent ---\n"
ALIVE_EVERY = 3.0  # seconds
SILENCE = 60.0  # seconds without a message after which the other end is lost
_BANNER = 1 << 16  # bytes that a login shell may print
_LENGTHS = struct.Struct("!QQ")

NOTHING: Mapping[str, object] = {}

Message: TypeAlias = tuple[str, dict[str, Any], bytes]


class Messages:
    """One end of the pipes. Any thread may send, one thread receives and closes.

    A thread sends "alive" every few seconds until the outgoing pipe is closed."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._stopped = os.eventfd(0)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._stay_alive, name="farandole-alive", daemon=True)
        self._thread.start()

    def send(self, kind: str, fields: Mapping[str, object] = NOTHING, blob: bytes = b"") -> None:
        """Send a message; blocks until the pipe has taken it. Raises `OSError` when the other end is gone."""
        record = json.dumps([kind, dict(fields)]).encode()
        with self._sending:
            if self._closed.is_set():
                raise BrokenPipeError("the connection is closed")
            for part in (_LENGTHS.pack(len(record), len(blob)) + record, blob):
                left = memoryview(part)
                while left:
                    left = left[os.write(self._outgoing, left) :]

    def receive(self) -> Message:
        """Wait for a message. Raises `EOFError` when the other end is gone, `TimeoutError` after `SILENCE`."""
        while True:
            record, blob = _LENGTHS.unpack(self._read(_LENGTHS.size))
            kind, fields = json.loads(self._read(record))
            data = self._read(blob)
            if kind != "alive":
                return kind, fields, data

    def skip_banner(self, seconds: float) -> None:
        """Read up to MARKER. Raises `EOFError`, `TimeoutError`, or `ValueError` after 64 KiB of other output."""
        deadline = time.monotonic() + seconds
        seen = b"\n"
        while not seen.endswith(MARKER):
            if len(seen) > _BANNER:
                raise ValueError(f"the shell there prints {seen[:200]!r}..., and no agent answers")
            seen += self._read(1, deadline - time.monotonic())

    def close_outgoing(self) -> None:
        """Close the outgoing pipe, so that the other end reads the end of file. Idempotent."""
        with self._sending:
            if not self._closed.is_set():
                self._closed.set()
                os.close(self._outgoing)
        self._thread.join()

    def stop(self) -> None:
        """Make `receive` in another thread raise `EOFError`, now and later. Idempotent, also after `close`."""
        with self._receiving:
            if self._incoming >= 0:
                os.eventfd_write(self._stopped, 1)

    def close(self) -> None:
        """Close both pipes; only the thread that receives may call this. Idempotent."""
        self.close_outgoing()
        with self._receiving:
            if self._incoming >= 0:
                os.close(self._incoming)
                os.close(self._stopped)
                self._incoming = -1

    def _read(self, count: int, seconds: float | None = None) -> bytes:
        parts, seconds = [], SILENCE if seconds is None else seconds
        poller = select.poll()  # select.select refuses descriptors from 1024 on
        poller.register(self._incoming, select.POLLIN)
        poller.register(self._stopped, select.POLLIN)
        while count:
            ready = [descriptor for descriptor, _ in poller.poll(max(0.0, seconds) * 1000)]
            if not ready:
                raise TimeoutError(f"nothing came for {seconds:.3g} s")
            if self._stopped in ready:
                raise EOFError("this end was closed")
            parts.append(os.read(self._incoming, min(count, 1 << 20)))
            if not parts[-1]:
                raise EOFError("the connection was closed")
            count -= len(parts[-1])
        return b"".join(parts)

    def _stay_alive(self) -> None:
        while not self._closed.wait(ALIVE_EVERY):
            with contextlib.suppress(OSError):  # `receive` notices
                self.send("alive")
