"""Reading of one rank's rows: its settings, and the pieces from which batches are cut."""

import logging
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from farandole.data.formats.fields import FieldOptions
from farandole.data.formats.nulls import nulls_in, settled
from farandole.data.formats.row_groups import RowGroup
from farandole.data.loading.batches import joined, rows_of
from farandole.data.loading.order import EpochOrder
from farandole.data.loading.plans import GlobalPlan
from farandole.data.loading.pool import RUN_BYTES, ReadPool
from farandole.data.loading.process_pool import ProcessPool
from farandole.data.loading.rounds import Columns, Piece, RowGroupReader, Transform, read_ahead, read_rounds
from farandole.data.loading.row_memory import RowMemory, TemporaryRows
from farandole.data.loading.settings import check_count, check_seconds
from farandole.data.loading.values import Ragged, SparseRows, Values
from farandole.errors import ConfigError, DataError

T = TypeVar("T")

log = logging.getLogger(__name__)

# Bytes of a round if rows need not come from more row groups, and of the pieces of a larger round: they should fit a
# processor's cache. In file order, each rank has a round of its own.
ROUND_BYTES = 4 << 20
# Limits of the rounds that are read because threads would be idle.
_ROUNDS_AHEAD = 64
_BYTES_AHEAD = 64 << 20
_CHOSEN = ("shuffle_window", "lanes", "window")  # from the row groups, where they are None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Settings of reading; those that are None are chosen from the row groups, alike on every rank.

    shuffle, seed: the order. shuffle_row_groups: if False, row groups keep their order, and the rows of a window are
    shuffled. shuffle_window: the number of rows, of all ranks together, that are shuffled together; larger windows mix
    better. shuffle_bytes: the most memory of a window that is chosen from the row groups. memory: the bytes of decoded
    rows that a rank holds; if its windows take more, the rows are in temporary files. lanes: see
    `loading.order`; with more lanes than ranks, a rank reads fewer row groups. window: `shuffle_window` divided
    by the number of lanes. workers: the number of threads that read; 0: one thread reads, and the calling thread
    gathers the rows of a batch. ahead: the number of rounds that are read before they are needed; up to 64 MiB if
    threads would be idle, unless it is 0. timeout: the seconds to wait for a row group. transform: called on a thread
    with the columns of any number of rows; must return columns of as many rows. processes: the workers are processes,
    each with a copy of `transform` that it calls with whole row groups; for functions that hold Python's lock. They
    wait for a minute after an epoch for the next; every row is copied twice.
    """

    shuffle: bool = True
    seed: int = 0
    shuffle_row_groups: bool = True
    shuffle_window: int | None = None
    shuffle_bytes: int = 512 << 20
    memory: int = 1 << 30
    lanes: int | None = None
    window: int | None = None
    workers: int = 2
    ahead: int = 1
    timeout: float = 300.0
    transform: Transform | None = None
    processes: bool = False
    fields: FieldOptions = field(default_factory=FieldOptions)

    def __post_init__(self) -> None:
        for name in ("seed", "shuffle_window", "shuffle_bytes", "memory", "lanes", "window", "workers", "ahead"):
            value = getattr(self, name)
            if value is not None or name not in _CHOSEN:
                check_count(name, value, 0 if name in ("seed", "memory", "workers", "ahead") else 1)
        if self.window is not None and self.shuffle_window is not None:
            raise ConfigError("window", "is shuffle_window divided by the number of lanes; set one of them")
        check_seconds("timeout", self.timeout)
        transform: object = self.transform
        if transform is not None and not callable(transform):
            raise ConfigError("transform", f"must be a function of columns, got {transform!r}")
        if not isinstance(self.fields, FieldOptions):
            raise ConfigError("fields", f"must be FieldOptions(...), got {self.fields!r}")
        if self.processes and not self.workers:
            raise ConfigError("processes", "are as many as there are workers, of which there are none")


def read_pieces(
    reader: RowGroupReader,
    asked: Reading,
    order: EpochOrder,
    plan: GlobalPlan,
    rank: int,
    row_bytes: int,
    known: dict[RowGroup, pa.Table],
    planned: Columns,
) -> Generator[Piece]:
    """Yield the rows of `rank` from `plan.start` on, in pieces of any length, and read ahead.

    `row_bytes` is an estimate, for the memory that reading ahead may take. Row groups in `known` were read before: each
    is taken from there once, and not read again. `planned` is that of `transformed`."""
    transform, rows = asked.transform, order.order.row_groups

    with ExitStack() as stack:
        # Threads that wait for a store use no processor: one for each request in flight, and a quarter more to decode.
        far = not asked.processes and reader.source.in_flight > 0
        least = max(1, asked.workers)

        def wanted() -> int:
            return reader.source.in_flight if far else least

        def weigh(number: int) -> int:
            return RUN_BYTES if far else int(rows[number]) * row_bytes

        pool: ReadPool[int, Piece]
        memory = _row_memory(asked, order, plan, rank, row_bytes)
        if asked.processes:
            act = partial(reader.each, then=partial(transformed, transform=transform, planned=planned))
            pool = ProcessPool(act, asked.workers, weigh, lambda number: reader.source.row_groups[number], memory.keep)
            transform = None
        else:
            read = partial(reader.each, memory=memory, known=known)
            pool = ReadPool(read, lambda: max(least, wanted() * 5 // 4) if far else least, weigh)
        stack.callback(pool.close)
        rounds = read_rounds(
            order,
            plan,
            rank,
            read=pool.submit,
            wait=pool.wait,
            ahead=asked.ahead,
            most_ahead=min(_ROUNDS_AHEAD, _BYTES_AHEAD // (row_bytes * order.order.round_rows)) if asked.ahead else 0,
            idle=lambda: pool.unfinished < 2 * wanted(),  # one that is read and one that waits, for each thread
            timeout=asked.timeout,
            most_rows=max(1, ROUND_BYTES // row_bytes),
        )
        made = (transformed(columns, transform, planned) for columns in rounds)
        # In file order no rows are gathered, so a thread would only pass on the columns that others have read.
        with_thread = asked.workers and (asked.shuffle or transform is not None)
        yield from read_ahead(made, 1, pool.cancel) if with_thread else made


def _row_memory(asked: Reading, order: EpochOrder, plan: GlobalPlan, rank: int, row_bytes: int) -> RowMemory:
    """Return the memory of decoded rows: files, if `asked.memory` is too little.

    A rank holds a window of each of its lanes, the next one, and the row group where they end. In file order each
    thread may be a row group ahead."""
    whole = order.order
    in_lane, largest = -(-whole.rows // whole.lanes), int(np.max(whole.row_groups, initial=0))
    in_order = 0 if whole.seed is not None else asked.workers * largest
    held = (len(plan.lanes_of(rank)) * (min(2 * whole.window, in_lane) + largest) + in_order) * row_bytes
    if held <= asked.memory:
        return RowMemory()
    log.info("about %d MiB of decoded rows are held in temporary files: memory is %d", held >> 20, asked.memory)
    return TemporaryRows()


def checked_meanwhile(items: Generator[T], check: Callable[[], None]) -> Generator[T]:
    """Yield the items; call `check` on a thread meanwhile, and wait for it before the first item is yielded.

    If both fail, raises the error of `check`, which explains that of the first item."""
    with ThreadPoolExecutor(1, thread_name_prefix="farandole-look") as pool, closing(items):
        checking = pool.submit(check)
        try:
            first = next(items, None)
        finally:
            checking.result()
        if first is not None:
            yield first
            yield from items


def transformed(piece: Piece, transform: Transform | None, planned: Columns) -> Piece:
    """Return the columns, with a user's transform applied; `planned` has no rows, and the columns' planned types.

    Raises `DataError` for a transform that returns no columns, changes the number of rows, or leaves nulls or arrays of
    other lengths. Columns in its attribute `nullable`, if it has one, may keep their nulls. What NumPy takes for an
    array, such as a pandas Series, becomes one."""
    if transform is None or not piece:
        return piece
    columns, nullable = joined(piece), getattr(transform, "nullable", ())
    # Before the transform, which may fill them in place.
    nulls = {
        name: nulls_in(values, planned[name])
        for name, values in columns.items()
        if name in planned and name not in nullable
    }
    made: Piece = {}
    returned = transform(dict(columns))
    if not isinstance(returned, Mapping) or not returned:
        raise DataError("", f"the transform must return a dictionary of columns, got {returned!r}")
    for name, found in returned.items():
        values = _checked_values(name, found)
        if len(values) != rows_of(columns):
            raise DataError(
                name,
                f"the transform made {len(values)} rows of {rows_of(columns)}; it may not change their number",
            )
        known = name in nulls
        made[name] = settled(name, columns[name], nulls[name], values, planned[name]) if known else values
    return made


def _checked_values(name: str, found: object) -> Values:
    """Return a column that a transform returned; raises `DataError` if it is no array with an item for each row."""
    if isinstance(found, Ragged | SparseRows):
        return found
    array = np.asarray(found) if hasattr(found, "__array__") else None
    if array is None or not array.ndim:
        problem = f"the transform returned {type(found).__name__}; return an array with an item for each row"
        raise DataError(name, problem)
    return array
