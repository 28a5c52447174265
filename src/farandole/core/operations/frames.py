"""Frames: byte strings with their lengths in front, so that several can be joined and split again."""

import struct

__all__ = ["LENGTH", "split_frames", "write_frame"]

LENGTH = struct.Struct("<Q")


def write_frame(payload: bytes) -> bytes:
    """Return `payload` with its 64-bit length in front."""
    return LENGTH.pack(len(payload)) + payload


def split_frames(joined: memoryview) -> list[memoryview]:
    """Split joined frames into their payloads."""
    parts = []
    start = 0
    while start < len(joined):
        body = start + LENGTH.size
        end = body + LENGTH.unpack_from(joined, start)[0]
        assert end <= len(joined), "a frame is longer than what arrived"
        parts.append(joined[body:end])
        start = end
    return parts
