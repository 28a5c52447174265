"""Hadoop's file system in memory, because the real client needs a Java library and a cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.arrow import HadoopFileSystem
from fsspec.implementations.memory import MemoryFileSystem


class Hadoop(MemoryFileSystem):  # type: ignore[misc]
    """File system in memory with Hadoop's URLs."""

    protocol = "hdfs"
    store: ClassVar[dict[str, Any]] = {}
    _strip_protocol = HadoopFileSystem._strip_protocol
    _get_kwargs_from_urls = staticmethod(HadoopFileSystem._get_kwargs_from_urls)

    def __init__(self, host: str = "default", port: int = 0, user: str | None = None, **others: Any) -> None:
        super().__init__(**others)
        self.address = (host, port, user)


@contextmanager
def hadoop_in_memory() -> Iterator[None]:
    """Register `Hadoop` for Hadoop's URLs in a block."""
    fsspec.register_implementation("hdfs", Hadoop, clobber=True)
    try:
        yield
    finally:
        fsspec.register_implementation("hdfs", HadoopFileSystem, clobber=True)
