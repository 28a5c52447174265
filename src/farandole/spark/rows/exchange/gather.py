"""Gathering of a rank's shares in a file of its own, in the rank's barrier task."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import BinaryIO, TypedDict

import pyarrow as pa
import pyarrow.compute as pc

from farandole.spark.rows.disks import nameless_file, no_room
from farandole.spark.rows.exchange.access import Kept
from farandole.spark.rows.spill import Spill

log = logging.getLogger(__name__)


def gather_rows(
    shares: Iterable[pa.RecordBatch],
    schemas: Sequence[pa.Schema],
    directory: str,
    secret: bytes,
    *,
    rank: int,
    stop: Callable[[], bool],
) -> list[Spill]:
    """Copy a rank's shares among `shares`, rows of SHARE_SCHEMA, into one file for each DataFrame, in `directory`.

    The shares are in the order of partitions, in whatever order Spark delivers their places. A DataFrame without a
    share becomes a file with its schema alone. Ends early if `stop()` is true. Raises `CacheError` if the disk is full,
    `SourceError` if shares are lost with the host that held them."""
    # Filtered first: a task of several ranks calls this for each of them, with the shares of all.
    own = [share for batch in shares for share in batch.filter(pc.equal(batch.column("rank"), rank)).to_pylist()]
    own.sort(key=lambda share: (share["partition"], share["turn"]))
    started = time.monotonic()
    with ExitStack() as opened, ExitStack() as connections:
        keepers, made = Keepers(secret, rank, connections), []
        for number, schema in enumerate(schemas):
            file = nameless_file(directory)
            opened.callback(file.close)
            mine = [share for share in own if share["number"] == number]
            try:
                if mine:
                    keepers.copy(mine, file, stop)
                else:
                    pa.ipc.new_stream(pa.PythonFile(file, "w"), schema).close()
            except OSError as error:
                raise no_room(error, directory) from error
            made.append(Spill(file, sum(share["rows"] for share in mine)))
            size = os.fstat(file.fileno()).st_size
            log.info("%d rows, %d bytes gathered in %.1f s", made[-1].rows, size, time.monotonic() - started)
        opened.pop_all()
        return made


class Share(TypedDict):
    """The columns of a row of `SHARE_SCHEMA` that say where a share is."""

    keeper: str
    file: int
    at: int
    length: int


class Keepers:
    """Keepers from which a rank's task copies: its own host's first, then others, in an order that differs by rank.

    `connections` closes the connections."""

    def __init__(self, secret: bytes, rank: int, connections: ExitStack) -> None:
        self._secret, self._rank, self._connections = secret, rank, connections
        here = Kept.here(secret)
        self._known = {here.address: connections.enter_context(here)} if here is not None else {}

    def copy(self, shares: Sequence[Share], out: BinaryIO, stop: Callable[[], bool]) -> None:
        """Copy `shares` to `out`, so that they follow each other there; ends early if `stop()` is true."""
        starts = itertools.accumulate((share["length"] for share in shares), initial=0)
        by_keeper: dict[str, list[tuple[int, Share]]] = {}
        for start, share in zip(starts, shares, strict=False):
            by_keeper.setdefault(share["keeper"], []).append((start, share))
        for address in self._in_order(by_keeper):
            if address not in self._known:
                self._known[address] = self._connections.enter_context(Kept.at(address, self._secret))
            for start, share in by_keeper[address]:
                if stop():
                    return
                out.seek(start)
                self._known[address].copy(share["file"], share["at"], share["length"], out)

    def _in_order(self, addresses: Iterable[str]) -> list[str]:
        near = [address for address in self._known if address in addresses]
        far = sorted(set(addresses) - set(near))
        first = self._rank % len(far) if far else 0
        return near + far[first:] + far[:first]
