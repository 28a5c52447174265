"""The barrier task of a rank: brings the rank's shares together in a file of its own."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import pyarrow as pa

from farandole.spark.disks import nameless_file, no_room
from farandole.spark.exchange.access import Kept
from farandole.spark.spill import Spill

__all__ = ["gather_rows"]


def gather_rows(
    shares: Iterable[pa.RecordBatch],
    schemas: Sequence[pa.Schema],
    directory: str,
    secret: bytes,
    *,
    stop: Callable[[], bool],
) -> list[Spill]:
    """Copy a rank's shares, named by rows of SHARE_SCHEMA, into one file for each DataFrame, in `directory`.

    They come in the order of partitions, however Spark has ordered their names. A DataFrame of which there is no share
    is a file of its `schemas` alone. Ends early when `stop` says so. Raises `CacheError` when the disk is full,
    `SourceError` when shares are gone with the host that held them."""
    named = [share for batch in shares for share in batch.to_pylist()]
    named.sort(key=lambda share: (share["number"], share["partition"], share["turn"]))
    with ExitStack() as stack, ExitStack() as keepers:
        here = Kept.here(secret)
        known = {here.address: keepers.enter_context(here)} if here is not None else {}
        made = []
        for number, schema in enumerate(schemas):
            mine = [share for share in named if share["number"] == number]
            file = nameless_file(directory)
            stack.callback(file.close)
            try:
                if not mine:
                    with pa.ipc.new_stream(pa.PythonFile(file, "w"), schema):
                        pass
                for share in mine:
                    if stop():
                        break
                    address = share["keeper"]
                    if address not in known:
                        known[address] = keepers.enter_context(Kept.at(address, secret))
                    known[address].copy(share["file"], share["at"], share["length"], file)
            except OSError as error:
                raise no_room(error, directory) from error
            made.append(Spill(file, sum(share["rows"] for share in mine)))
        stack.pop_all()
        return made
