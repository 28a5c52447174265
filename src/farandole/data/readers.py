"""Readers with Petastorm's names and arguments: `make_reader` and `make_batch_reader`.

The arguments have Petastorm's meaning, but rows are distributed differently: every row comes exactly once per epoch
over all shards, in an order that changes with the epoch. docs/guide/data.md lists the differences.
"""

import logging
import os
import re
from collections import namedtuple
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar
from weakref import WeakSet

import numpy as np
import pyarrow as pa

from farandole.data.agreement import Gather, together
from farandole.data.batches import Batch, BatchBuffer
from farandole.data.feed_loader import FeedLoader
from farandole.data.fields import FieldOptions
from farandole.data.loader import Loader
from farandole.data.meter import Meter, Metrics
from farandole.data.reading import Reading
from farandole.data.rounds import Columns
from farandole.data.row_groups import Source, rows_in
from farandole.data.selection import Condition, Predicate, SelectedSource
from farandole.data.settings import check_count
from farandole.data.state import NO_VERSION
from farandole.data.values import Ragged, SparseRows, Values
from farandole.data.versions import same_version, version_of
from farandole.errors import ConfigError, DataError
from farandole.masking import mask
from farandole.refusals import IGNORED_READER_ARGUMENTS, REFUSED_READER_ARGUMENTS

__all__ = ["Reader", "ReaderOptions", "Transforming", "make_batch_reader", "make_feed_reader", "make_reader"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULT_CACHE_LIMIT = 10 << 30
_LEAST_BATCH = 1024


class Transforming(Protocol):
    """Protocol of a `transform_spec`; `farandole.data.transform.TransformSpec` is one."""

    def frames(self, columns: Columns) -> Columns:
        """Transform rows as one frame."""
        ...

    def rows(self, columns: Columns) -> Columns:
        """Transform rows one by one."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """Petastorm's arguments of both functions, with its defaults, and four of farandole's at the end.

    `version` is the version of a table to read. With `gather`, an all-gather of objects, making a reader is collective:
    shards compare their data, and read the version that the first shard has opened.

    Raises `ConfigError` for values that are invalid or not supported."""

    reader_pool_type: Literal["thread", "process", "dummy"] = "thread"
    workers_count: int = 10
    pyarrow_serialize: bool = False
    results_queue_size: int = 50
    seed: int | None = None
    shuffle_rows: bool = False
    shuffle_row_groups: bool = True
    shuffle_row_drop_partitions: int = 1
    predicate: Predicate | None = None
    rowgroup_selector: object = None
    num_epochs: int | None = 1
    cur_shard: int | None = None
    shard_count: int | None = None
    shard_seed: int | None = None
    cache_type: Literal["null", "local-disk"] | None = "null"
    cache_location: str | None = None
    cache_size_limit: int | None = None
    cache_row_size_estimate: int | None = None
    cache_extra_settings: Mapping[str, object] | None = None
    hdfs_driver: str = "libhdfs3"
    transform_spec: Transforming | None = None
    filters: Sequence[Condition] | Sequence[Sequence[Condition]] | None = None
    storage_options: Mapping[str, object] | None = field(default=None, repr=False)  # holds secrets
    zmq_copy_buffers: bool = True
    filesystem: object = None
    nulls: Mapping[str, object] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)
    version: int | None = None
    gather: Gather | None = None

    def __post_init__(self) -> None:
        for name, why in REFUSED_READER_ARGUMENTS.items():
            if getattr(self, name) is not None:
                raise ConfigError(name, why)
        if (self.cur_shard is None) != (self.shard_count is None):
            raise ConfigError("cur_shard", "and shard_count go together")
        if self.num_epochs is not None:  # None: endless
            check_count("num_epochs", self.num_epochs, 1)
        if self.reader_pool_type not in ("thread", "process", "dummy"):
            raise ConfigError("reader_pool_type", f"must be thread, process or dummy, got {self.reader_pool_type!r}")
        if self.cache_type not in (None, "null", "local-disk"):
            raise ConfigError("cache_type", f"must be null or local-disk, got {self.cache_type!r}")
        if self.cache_type == "local-disk" and self.cache_location is None:
            raise ConfigError("cache_location", "name a folder for cache_type='local-disk'")
        if self.reader_pool_type == "process" and self.transform_spec is None:
            log.warning(
                "reader_pool_type='process' reads on threads without a transform_spec: Arrow decodes outside of "
                "Python's lock"
            )
        for each in fields(self):
            if each.name in IGNORED_READER_ARGUMENTS and getattr(self, each.name) != each.default:
                log.warning("%s means nothing here and is ignored", each.name)


def make_reader(
    dataset_url: str | Sequence[str], schema_fields: Sequence[Any] | None = None, **options: Any
) -> "Reader":
    """Return a reader of single rows, as named tuples; `options` are the fields of `ReaderOptions`.

    Raises `DataError` and `SourceError` for the data, `ConfigError` for options."""
    return _read_files(dataset_url, schema_fields, ReaderOptions(**options), batched=False)


def make_batch_reader(
    dataset_url_or_urls: str | Sequence[str], schema_fields: Sequence[Any] | None = None, **options: Any
) -> "Reader":
    """Return a reader of batches, as named tuples of arrays; `options` are the fields of `ReaderOptions`.

    A batch has about as many rows as a row group, the last batch of an epoch fewer. Raises as `make_reader` does."""
    return _read_files(dataset_url_or_urls, schema_fields, ReaderOptions(**options), batched=True)


def make_feed_reader(
    source: Source, schema_fields: Sequence[Any] | None = None, *, gather: Gather | None = None, **options: Any
) -> "Reader":
    """Return a reader of the rows that only this rank has, as `make_batch_reader` does; `cur_shard` is the rank.

    With several ranks, making a reader is collective and needs `gather`; reading is not collective. A rank with more
    rows yields more batches. Raises `ConfigError` for options that apply to files only, and as `FeedLoader` does."""
    asked = ReaderOptions(**options)
    _refuse_for_own_rows(asked)

    def look() -> tuple[Source, list[str]]:
        return _selected(source, asked, batched=True), _columns(source.schema, schema_fields)

    chosen, columns = together(look, gather)
    loader = FeedLoader(
        chosen,
        batch_size=_LEAST_BATCH,
        policy="join",
        columns=columns,
        rank=asked.cur_shard or 0,
        size=asked.shard_count or 1,
        reading=_reading(asked, batched=True),
        gather=gather,
        alone=True,  # users cut batches to other sizes, so ranks need the next batch at different times
    )
    return Reader(loader, asked.num_epochs, batched=True)


class Reader:
    """An iterator over rows or batches of one shard, for a number of epochs; close it with `with`, or `stop`.

    `loader` is the loader that reads the rows; it has their state and metrics.
    """

    def __init__(self, loader: Loader, num_epochs: int | None, *, batched: bool) -> None:
        self.loader, self.num_epochs, self.batched_output = loader, num_epochs, batched
        self._started_with = loader.epoch
        self._handed_out: WeakSet[Generator[Any]] = WeakSet()  # they hold threads while they are not closed
        self._items = self._stoppable(self._read())
        self.last_row_consumed = False
        self._made: type | None = None  # made from the first batch: a transform may rename columns

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next row or batch; blocks while it is being read."""
        try:
            return next(self._items)
        except StopIteration:
            self.last_row_consumed = True
            raise

    next = __next__

    def batches(self) -> Iterator[Batch]:
        """Yield the remaining batches, as columns by name; for adapters to frameworks.

        Raises `DataError` if the number of epochs is endless and this shard has no rows."""
        return self._stoppable(self._batches())

    def _batches(self) -> Generator[Batch]:
        idle = 0  # epochs without a row for this shard; the first may have been at its end
        while self.num_epochs is None or self.loader.epoch - self._started_with < self.num_epochs:
            idle += 1
            for batch in self.loader:
                if batch.rows:
                    idle = 0
                    yield batch
            if idle > 1 and self.num_epochs is None:
                raise DataError("", f"{self.loader.rows} rows leave this shard none; take fewer shards, or more rows")

    def batches_of(self, rows: int) -> Iterator[Columns]:
        """Yield the remaining rows in batches of `rows`, the last one smaller; begin again after the last row."""
        return self._stoppable(self._batches_of(rows))

    def _batches_of(self, rows: int) -> Generator[Columns]:
        if self.last_row_consumed:
            self.reset()
        buffer = BatchBuffer((dict(batch) for batch in self.batches()), Meter(0), open_end=True)
        while columns := buffer.take(rows):
            yield columns
        self.last_row_consumed = True

    def reset(self) -> None:
        """Begin again with as many epochs; raises `ConfigError` if the last row was not consumed."""
        if not self.last_row_consumed:
            raise ConfigError("reset", "is for a reader whose last row was consumed; make another reader")
        self._items = self._stoppable(self._read())
        self.last_row_consumed, self._started_with = False, self.loader.epoch

    def stop(self) -> None:
        """End all iterators over the reader, and their threads; these iterators yield nothing more."""
        for each in list(self._handed_out):
            with suppress(ValueError):  # a thread of TensorFlow is in it
                each.close()

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

    def _stoppable(self, made: Generator[T]) -> Generator[T]:
        self._handed_out.add(made)
        return made

    def _read(self) -> Generator[Any]:
        for batch in self.batches():
            make = self.record(batch)
            columns = [_cells(values) for values in batch.values()]
            if self.batched_output:
                yield make(*columns)
            else:
                yield from map(make, *columns)

    def record(self, names: Iterable[str]) -> type:
        """Return the class of named tuples for columns of these names."""
        if self._made is None:
            # A name that is not an identifier becomes its position: _0, _1, ...
            self._made = namedtuple("Row", names, rename=True)  # type: ignore[misc]
        return self._made


def _read_files(
    urls: str | Sequence[str], schema_fields: Sequence[Any] | None, options: ReaderOptions, *, batched: bool
) -> Reader:
    # Imported here: these modules load slowly, and ranks that get a DataFrame's rows do not read files.
    from farandole.data.cache import CachedSource
    from farandole.data.sources import ParquetSource

    source: Source = ParquetSource(urls, options.storage_options, version=options.version, gather=options.gather)
    source = same_version(source, options.gather)
    if (
        version_of(source) != NO_VERSION
        and options.version is None
        and options.gather is None
        and options.cur_shard == 0
    ):
        log.warning(
            "%d shards each open the newest version of %s, which may differ if it is written to: pass version=%d, or "
            "gather=hvd.allgather_object",
            options.shard_count,
            mask(str(urls)),
            version_of(source),
        )
    if options.cache_type == "local-disk":
        assert options.cache_location is not None, "checked with the options"
        source = CachedSource(source, Path(options.cache_location), options.cache_size_limit or _DEFAULT_CACHE_LIMIT)
    source = _selected(source, options, batched=batched)
    columns = _columns(source.schema, schema_fields)
    rows, shards = int(rows_in(source.row_groups).sum()), options.shard_count or 1
    if options.num_epochs is None and 0 < rows < shards:
        # Refused on every rank: a rank without rows would wait for a row forever, and the others for that rank.
        raise DataError("", f"{rows} rows for {shards} shards in epochs without end; take at most {rows} shards")
    loader = Loader(
        source,
        batch_size=_batch_rows(source),
        policy="join",
        columns=columns,
        rank=options.cur_shard or 0,
        size=shards,
        reading=_reading(options, batched=batched),
        gather=options.gather,
        alone=True,  # readers of different shards need their next batches at different times
    )
    return Reader(loader, options.num_epochs, batched=batched)


def _refuse_for_own_rows(options: ReaderOptions) -> None:
    if options.cache_type == "local-disk":
        raise ConfigError("cache_type", "is for files far away, and these rows lie on this machine; leave it out")
    if options.reader_pool_type == "process" and options.transform_spec is not None:
        raise ConfigError("reader_pool_type", "'process' cannot read what only this process has; take 'thread'")
    if options.version is not None:
        raise ConfigError("version", "is that of a table, and these rows have none; leave it out")
    if options.storage_options is not None:
        raise ConfigError("storage_options", "are for URLs, and these rows have none; leave them out")


def _selected(source: Source, options: ReaderOptions, *, batched: bool) -> Source:
    for where in (options.filters, options.predicate):
        if where is not None:
            source = SelectedSource(source, where, frames=batched)
    return source


def _columns(schema: pa.Schema, asked: Sequence[Any] | None) -> list[str]:
    """Return the columns that `asked` chooses: by name, by regular expression, or by objects with a `name`."""
    if asked is None:
        return list(schema.names)
    if isinstance(asked, str) or not all(isinstance(each, str) or hasattr(each, "name") for each in asked):
        raise ConfigError("schema_fields", f"must be a list of names or fields, got {asked!r}")
    chosen: list[str] = []
    for each in asked:
        pattern = each if isinstance(each, str) else each.name
        found = [pattern] if pattern in schema.names else [name for name in schema.names if re.fullmatch(pattern, name)]
        if not found:
            raise DataError(pattern, f"is not in the data, which has {', '.join(schema.names)}")
        chosen += [name for name in found if name not in chosen]
    return chosen


def _batch_rows(source: Source) -> int:
    held = [group.rows for group in source.row_groups if group.rows]
    return max(_LEAST_BATCH, sum(held) // max(1, len(held)))


def _reading(options: ReaderOptions, *, batched: bool) -> Reading:
    spec, own = options.transform_spec, options.reading
    asked = FieldOptions(
        nulls=dict(own.fields.nulls) | dict(options.nulls),
        vocabulary=own.fields.vocabulary,
        ragged=own.fields.ragged,
        dense=own.fields.dense,
    )
    transform = own.transform if spec is None else spec.frames if batched else spec.rows
    processes = options.reader_pool_type == "process" and transform is not None
    # More processes than processors would only cost memory and time to start.
    workers = min(options.workers_count, len(os.sched_getaffinity(0))) if processes else options.workers_count
    return Reading(
        shuffle=options.shuffle_row_groups or options.shuffle_rows,
        seed=next((seed for seed in (options.seed, options.shard_seed) if seed is not None), own.seed),
        lanes=own.lanes,
        window=own.window,
        workers=0 if options.reader_pool_type == "dummy" else workers,
        processes=processes,
        ahead=own.ahead,
        timeout=own.timeout,
        transform=transform,
        fields=asked,
    )


def _cells(values: Values) -> Any:
    """Return an array with one item per row; for rows of different lengths, an array of arrays."""
    if isinstance(values, SparseRows):
        return values.dense()
    if isinstance(values, Ragged):
        cells = np.empty(len(values), object)
        for place, row in enumerate(values.rows()):
            cells[place] = row
        return cells
    return values
