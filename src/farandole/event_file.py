"""TensorBoard event files, written without TensorFlow, TensorBoard or a thread.

A file is a sequence of records (length, checksum of it, message, checksum of it); a message is an `Event` of
TensorFlow's `event.proto`, of which a curve needs five fields.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from farandole.file_errors import naming

# Field numbers and wire types of event.proto and summary.proto, as protobuf writes them before each field.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY = b"\x09", b"\x10", b"\x1a", b"\x2a"
_VALUE, _TAG, _SIMPLE_VALUE = b"\x0a", b"\x0a", b"\x15"


class EventFile:
    """One new event file in `folder`, which TensorBoard shows as one run (with the other files of that folder).

    Creates the folder. Scalars reach the file at `flush` and `close`. Raises `OSError` when it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files whose name holds "tfevents", in the order of their names.
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._file = self.path.open("xb")
        self._write(_FILE_VERSION + _sized(b"brain.Event:2"))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each of the curves named; raises `ValueError` for a negative step."""
        points = (
            _TAG + _sized(tag.encode()) + _SIMPLE_VALUE + struct.pack("<f", value) for tag, value in values.items()
        )
        summary = b"".join(_VALUE + _sized(point) for point in points)
        self._write(_STEP + _varint(step) + _SUMMARY + _sized(summary))

    def flush(self) -> None:
        """Write all scalars added so far to the file."""
        with naming(str(self.path)):
            self._file.flush()

    def close(self) -> None:
        """Flush and close the file; no scalars can be added afterwards."""
        with naming(str(self.path)):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, fields: bytes) -> None:
        event = _WALL_TIME + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        with naming(str(self.path)):
            self._file.write(length + _checksum(length) + event + _checksum(event))


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    if number < 0:
        raise ValueError(f"must be >= 0, got {number}")
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_OF_BYTE = tuple(_crc_of_byte(byte) for byte in range(256))


def _checksum(content: bytes) -> bytes:
    """Return the masked CRC-32C that TensorFlow's record files use."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC_OF_BYTE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
