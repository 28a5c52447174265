"""Splitter of a rank's output into lines."""

from collections.abc import Iterator

LONGEST_LINE = 64 * 1024  # bytes; a longer line is cut, so that binary output cannot fill the memory


class LineSplitter:
    """Turns chunks of bytes into lines of text; bytes that are not UTF-8 show as U+FFFD.

    A bare carriage return ends a line, too: each redrawing of a progress bar is a line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the lines that `chunk` completes, without their ends; keep the rest for the next chunk."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        texts = [text for line in lines for text in _texts(line)]
        redrawn = self._rest.rfind(b"\r", 0, -1)  # the last byte may be the first of "\r\n"
        if redrawn >= 0:
            texts += [text for text in _texts(self._rest[:redrawn]) if text]
            self._rest = self._rest[redrawn + 1 :]
        while len(self._rest) > LONGEST_LINE:
            end = _cut(self._rest, LONGEST_LINE)
            texts.append(self._rest[:end].decode("utf-8", "replace"))
            self._rest = self._rest[end:]
        return texts

    def flush(self) -> list[str]:
        """Return the text after the last line's end."""
        rest, self._rest = self._rest, b""
        return [text for text in _texts(rest) if text]


def _texts(line: bytes) -> Iterator[str]:
    """Yield the texts of a line: its non-empty pieces between carriage returns, each cut at the longest length."""
    line = line.removesuffix(b"\r")
    pieces = [piece for piece in line.split(b"\r") if piece] if b"\r" in line else [line]
    for piece in pieces or [b""]:
        start, end = 0, _cut(piece, LONGEST_LINE)
        yield piece[:end].decode("utf-8", "replace")
        while end < len(piece):
            start, end = end, _cut(piece, end + LONGEST_LINE)
            yield piece[start:end].decode("utf-8", "replace")


def _cut(line: bytes, most: int) -> int:
    """Return the largest place up to `most` at which `line` can be cut without dividing a character of UTF-8."""
    if most >= len(line):
        return len(line)
    starts = (most - back for back in range(4) if line[most - back] & 0xC0 != 0x80)  # a character has up to 4 bytes
    return next(starts, most)
