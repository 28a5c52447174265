"""Errors of file systems with the file in their text."""

from collections.abc import Iterator
from contextlib import contextmanager

from farandole.masking import mask


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Add `path` to an `OSError` of the block that names no file, such as "No space left on device" from a write."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = mask(path)
        raise
