"""Readers with Petastorm's arguments, of any source of rows, and the reader of rows that only this rank has."""

import itertools
import os
from collections import namedtuple
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import GEN_CLOSED, getgeneratorstate
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from weakref import ref

from farandole.data.formats.columns import SchemaField, columns_by_pattern
from farandole.data.formats.selection import SelectedSource
from farandole.data.formats.source import Source
from farandole.data.loading.agreement import Gather, together
from farandole.data.loading.batches import Batch, BatchBuffer
from farandole.data.loading.feed_loader import FeedLoader
from farandole.data.loading.loader import Loader
from farandole.data.loading.meter import Meter, Metrics
from farandole.data.loading.reading import Reading
from farandole.data.loading.rounds import Columns
from farandole.data.loading.values import Array, Ragged, SparseRows, Values, cells_of
from farandole.data.reader_options import ReaderOptions
from farandole.data.unischema.decoding import Decoding
from farandole.data.unischema.schema import Unischema
from farandole.errors import ConfigError, NoDataAvailableError, ReaderError

T_co = TypeVar("T_co", covariant=True)

LEAST_BATCH = 1024
checked_options: Callable[..., ReaderOptions] = ReaderOptions  # arguments of users, which it checks


def make_feed_reader(
    source: Source,
    schema_fields: Sequence[SchemaField] | None = None,
    *,
    gather: Gather | None = None,
    **options: object,
) -> "Reader":
    """Return a reader of the rows that only this rank has, as `make_batch_reader` does; `cur_shard` is the rank.

    With several ranks, making a reader is collective and needs `gather`; reading is not collective. A rank with more
    rows yields more batches. Raises `ConfigError` for options that apply to files only, and as `FeedLoader` does."""
    asked = checked_options(**options)
    _refuse_for_own_rows(asked)

    def look() -> tuple[Source, list[str]]:
        columns = columns_by_pattern(source.schema, schema_fields, warn=not asked.cur_shard)
        return selected(source, asked, batched=True), columns

    chosen, columns = together(look, gather)
    loader = FeedLoader(
        chosen,
        batch_size=LEAST_BATCH,
        policy="join",
        columns=columns,
        rank=asked.cur_shard or 0,
        size=asked.shard_count or 1,
        reading=reading_of(asked, batched=True),
        gather=gather,
        alone=True,  # users cut batches to other sizes, so ranks need the next batch at different times
    )
    return Reader(loader, asked.num_epochs, batched=True)


class Reader:
    """An iterator over rows or batches of one shard, for a number of epochs; close it with `with`, or `stop`.

    The reader itself is one pass. `batches`, `batches_of`, the loaders of frameworks and `reset` each begin another
    one, from the first row of an epoch, however far the last one came. One pass runs at a time: older ones raise
    `ReaderError`. Pass k begins with epoch k * `num_epochs`, or k if these are endless, so that the shards of one pass
    fit together. `loader` is the loader that reads the rows; it has their state and metrics. A pass begins where the
    program has moved it.
    """

    def __init__(self, loader: Loader, num_epochs: int | None, *, batched: bool) -> None:
        self.loader, self.num_epochs, self.batched_output = loader, num_epochs, batched
        self._pass: Callable[[], _Pass[object] | None] = lambda: None  # the latest; it holds threads until it is closed
        self._next_epoch = 0  # of the pass after the latest
        self._left_at: tuple[int, int, int] | None = None  # where the latest pass has left the loader
        self._stopped = False
        self._items = _Pass(self._begin, self._read())
        self.last_row_consumed = False
        # Made from the first batch: a transform may rename columns, and return them in any order.
        self._made: type | None = None
        self._names: list[str] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next row or batch; blocks while it is being read."""
        return next(self._items)

    next = __next__

    def batches(self) -> Iterator[Batch]:
        """Begin a pass of batches, as columns by name; for adapters to frameworks.

        Raises `NoDataAvailableError` if the number of epochs is endless and this shard has no rows."""
        return _Pass(self._begin, self._batches())

    def batches_of(self, rows: int) -> Iterator[Columns]:
        """Begin a pass of batches of `rows` rows, the last one smaller."""
        return _Pass(self._begin, self._batches_of(rows))

    def reset(self) -> None:
        """Begin again with as many epochs."""
        self._items = _Pass(self._begin, self._read())
        self.last_row_consumed = False

    def stop(self) -> None:
        """End the reader and its threads; iterators that have not come to their end raise `ReaderError` afterwards."""
        self._stopped = True
        current = self._pass()
        if current is not None:
            with suppress(ValueError):  # a thread of TensorFlow is in it
                current.end("was stopped, for instance by the end of its `with` block; make another reader")

    def _begin(self, begun: "_Pass[object]") -> None:
        """Make `begun` the latest pass: end the one before it, and put the loader at the first row."""
        if self._stopped:
            raise ReaderError("this reader was stopped; make another one")
        last = self._pass()
        if last is not None:
            try:
                last.end("has begun another pass; take one iterator of it at a time, or make a reader for each")
            except ValueError as error:  # another thread is in it
                raise ReaderError("another thread reads a pass of this reader; make a reader for each") from error
        if self._place() == self._left_at:
            state = self.loader.state_dict()
            self.loader.load_state_dict({**state, "epoch": self._next_epoch, "visited": 0})
        self._next_epoch = self.loader.epoch + (self.num_epochs or 1)
        self._pass, self.last_row_consumed = ref(begun), False

    def _place(self) -> tuple[int, int, int]:
        """Return where the loader is. Loading a state moves it, even to the place where it was."""
        return self.loader.moves, self.loader.epoch, len(self.loader)

    def _batches(self) -> Generator[Batch]:
        idle = 0  # epochs without a row for this shard; the first may have been at its end
        while self.num_epochs is None or self.loader.epoch < self._next_epoch:
            idle += 1
            for batch in self.loader:
                self._left_at = self._place()
                if batch.rows:
                    idle = 0
                    yield batch
            if idle > 1 and self.num_epochs is None:
                problem = f"{self.loader.rows} rows leave this shard none; take fewer shards, or more rows"
                raise NoDataAvailableError("", problem)
        self.last_row_consumed = True

    def _batches_of(self, rows: int) -> Generator[Columns]:
        buffer = BatchBuffer((dict(batch) for batch in self._batches()), Meter(0), open_end=True)
        while columns := buffer.take(rows):
            yield columns

    def join(self) -> None:
        """Do nothing: `stop` waits for the threads."""

    @property
    def metrics(self) -> Metrics | None:
        """Speed and waiting of the latest epoch; None before the first."""
        return self.loader.metrics

    @property
    def diagnostics(self) -> dict[str, float]:
        """The metrics as numbers by name."""
        metrics = self.loader.metrics
        return {} if metrics is None else metrics.scalars()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _read(self) -> Generator[object]:
        for batch in self._batches():
            make = self.record(batch)
            columns = [_cells(batch[name]) for name in self._names]
            if self.batched_output:
                yield make(*columns)
            else:
                yield from itertools.starmap(make, zip(*columns, strict=True))

    def record(self, names: Iterable[str]) -> type:
        """Return the class of named tuples for columns of these names."""
        if self._made is None:
            # A name that is not an identifier becomes its position: _0, _1, ...
            self._names = list(names)
            self._made = namedtuple("Row", self._names, rename=True)  # type: ignore[misc]
        return self._made


class _Pass(Generic[T_co]):
    """An iterator over a pass of a reader; `begin` is called before the first item."""

    def __init__(self, begin: Callable[["_Pass[T_co]"], None], items: Generator[T_co]) -> None:
        self._begin: Callable[[_Pass[T_co]], None] | None = begin
        self._items, self._ended = items, ""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        if self._begin is not None:
            self._begin(self)
            self._begin = None
        if self._ended:
            raise ReaderError(f"the reader of this iterator {self._ended}")
        return next(self._items)

    def end(self, why: str) -> None:
        """End it, and its threads, unless it has come to its end; `ValueError` if another thread is in it."""
        if getgeneratorstate(self._items) != GEN_CLOSED:
            self._ended = why
            self._items.close()


def _refuse_for_own_rows(options: ReaderOptions) -> None:
    if options.cache_type == "local-disk":
        raise ConfigError("cache_type", "is for files far away, and these rows lie on this machine; leave it out")
    if options.reader_pool_type == "process" and options.transform_spec is not None:
        raise ConfigError("reader_pool_type", "'process' cannot read what only this process has; take 'thread'")
    if options.version is not None:
        raise ConfigError("version", "is that of a table, and these rows have none; leave it out")
    if options.storage_options is not None:
        raise ConfigError("storage_options", "are for URLs, and these rows have none; leave them out")


def selected(source: Source, options: ReaderOptions, *, batched: bool) -> Source:
    """Return the rows of `source` that the options' filters and predicate select."""
    for where in (options.filters, options.predicate):
        if where is not None:
            source = SelectedSource(source, where, frames=batched)
    return source


def reading_of(options: ReaderOptions, *, batched: bool, schema: Unischema | None = None) -> Reading:
    """Return how to read by the options: order, workers, transform and nulls. Columns of `schema` are decoded first."""
    spec, own = options.transform_spec, options.reading
    transform = own.transform if spec is None else spec.frames if batched else spec.rows
    if schema is not None:
        transform = Decoding(schema, transform)
    processes = options.reader_pool_type == "process" and transform is not None
    # More processes than processors would only cost memory and time to start.
    workers = min(options.workers_count, len(os.sched_getaffinity(0))) if processes else options.workers_count
    return replace(
        own,
        shuffle=options.shuffle_row_groups or options.shuffle_rows,
        shuffle_row_groups=options.shuffle_row_groups,
        seed=next((seed for seed in (options.seed, options.shard_seed) if seed is not None), own.seed),
        workers=0 if options.reader_pool_type == "dummy" else workers,
        processes=processes,
        transform=transform,
        fields=replace(own.fields, nulls=dict(own.fields.nulls) | dict(options.nulls)),
    )


def _cells(values: Values) -> Array:
    """Return an array with one item per row; for rows of different lengths, an array of arrays."""
    if isinstance(values, SparseRows):
        return values.dense()
    return cells_of(values) if isinstance(values, Ragged) else values
