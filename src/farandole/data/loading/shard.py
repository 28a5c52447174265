"""Shard of one rank: a memory-mapped file of Arrow IPC streams, whose rows are gathered into NumPy arrays by number."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from farandole.data.formats.columns import check_names
from farandole.data.formats.fields import Arrays, Field, Numbers
from farandole.data.formats.shard_source import read_streams
from farandole.data.loading.order import permutation
from farandole.data.loading.plans import LocalPlan
from farandole.data.loading.values import Array
from farandole.errors import DataError

Number: TypeAlias = np.int8 | np.int16 | np.int32 | np.int64 | np.float32 | np.float64

# Without bool: Arrow packs eight into a byte, of which NumPy has no view. Callers cast bool to int8.
_DTYPES: dict[pa.DataType, np.dtype[Number]] = {
    pa.int8(): np.dtype(np.int8),
    pa.int16(): np.dtype(np.int16),
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
    pa.float32(): np.dtype(np.float32),
    pa.float64(): np.dtype(np.float64),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnFacts:
    """Summary of one column on one rank, which ranks exchange."""

    name: str
    dtype: str
    rows: int
    rows_with_nulls: int
    listed: bool  # True: lists of numbers; False: numbers
    shortest: int  # length of the shortest list; 0 without lists
    longest: int  # length of the longest list; 0 without lists


def agree_on_column(seen: Sequence[ColumnFacts]) -> int | None:
    """Return the length of the column's lists, None for numbers, given every rank's facts.

    The result is the same on every rank. Raises `DataError` for nulls, for no rows, and for empty or ragged lists.
    """
    name = seen[0].name
    nulls, rows = sum(each.rows_with_nulls for each in seen), sum(each.rows for each in seen)
    if nulls:
        raise DataError(name, f"{nulls} of {rows} rows are null or hold a null; fill them or drop these rows first")
    if rows == 0:
        raise DataError(name, "there are no rows")
    if not seen[0].listed:
        return None
    filled = [each for each in seen if each.rows]
    shortest, longest = min(each.shortest for each in filled), max(each.longest for each in filled)
    if shortest != longest:
        raise DataError(name, f"arrays of {shortest} to {longest} numbers; a tensor needs one length: pad or cut them")
    if longest == 0:
        raise DataError(name, "the arrays are empty")
    return longest


class RowColumn(Protocol):
    """A column whose rows can be taken by number."""

    def take(self, rows: NDArray[np.int64], /) -> Array:
        """Return these rows, in this order."""
        ...


@dataclass(frozen=True, slots=True)
class Column:
    """View of one column's numbers in the mapped file."""

    # windows[i] begins at the i-th item of the whole file, so that one index operation gathers rows of all chunks.
    windows: NDArray[Number]
    starts: NDArray[np.int64]  # first row of each chunk
    offsets: NDArray[np.int64]  # position of that row's first item, in items of this type
    width: int  # items per row

    def take(self, rows: NDArray[np.int64]) -> NDArray[Number]:
        """Copy these rows out of the file, in this order: (rows,) for numbers, (rows, width) for lists."""
        chunk = np.searchsorted(self.starts, rows, side="right") - 1
        taken: NDArray[Number] = self.windows[self.offsets[chunk] + (rows - self.starts[chunk]) * self.width]
        return taken


class ArrowShard:
    """Uncompressed Arrow IPC streams in a file that is mapped into memory; rows are read when they are taken.

    Methods raise `DataError` for a column that is absent or of a type that no tensor holds.
    """

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as mapped:
            self._whole = mapped.read_buffer()
        self._table = read_streams(self._whole)

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return int(self._table.num_rows)

    def chunked(self, name: str) -> pa.ChunkedArray:
        """Return a column of any type as it is in the file; raises `DataError` for an absent one."""
        check_names(self._table.schema, [name])
        return self._table.column(name)

    def facts(self, name: str) -> ColumnFacts:
        """Return the facts of one column; reads it for nulls and lengths of lists."""
        listed, dtype = self._kind(name)
        nulls, lengths = 0, [0]
        for chunk in self._chunks(name):
            nulls += chunk.null_count
            if listed:
                extremes = pc.min_max(pc.list_value_length(chunk)).as_py()
                lengths += [length for length in extremes.values() if length is not None]
                holders = pc.list_parent_indices(chunk).filter(chunk.flatten().is_null())
                nulls += len(holders.unique())
        seen = lengths[1:] or lengths
        return ColumnFacts(
            name=name,
            dtype=dtype.name,
            rows=self.rows,
            rows_with_nulls=nulls,
            listed=listed,
            shortest=min(seen),
            longest=max(seen),
        )

    def column(self, name: str, width: int | None) -> Column:
        """Return a view of one column without nulls; `width` is the result of `agree_on_column`."""
        _, dtype = self._kind(name)
        field: Field = Numbers(name=name, kind=dtype.name)
        if width is not None:
            field = Arrays(name=name, kind=dtype.name, shape=(width,))
        starts, offsets, first_row = [], [], 0
        for chunk in self._chunks(name):
            view = np.asarray(field.values(pa.chunked_array([chunk])))
            place = view.ctypes.data - self._whole.address
            if not 0 <= place < self._whole.size or place % dtype.itemsize:
                raise DataError(name, "its values do not lie plain in the file; write the file without compression")
            starts.append(first_row)
            offsets.append(place // dtype.itemsize)
            first_row += len(chunk)
        items = np.frombuffer(self._whole, dtype, count=self._whole.size // dtype.itemsize)
        if width is not None:
            # A rank without rows may have a file that is shorter than a row.
            items = sliding_window_view(items, width) if starts else np.empty((0, width), dtype)
        return Column(
            windows=items,
            starts=np.array(starts, np.int64),
            offsets=np.array(offsets, np.int64),
            width=1 if width is None else width,
        )

    def _chunks(self, name: str) -> list[pa.Array]:
        return [chunk for chunk in self._table.column(name).chunks if len(chunk)]

    def _kind(self, name: str) -> tuple[bool, np.dtype[Number]]:
        check_names(self._table.schema, [name])
        kind: pa.DataType = self._table.schema.field(name).type
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        dtype = _DTYPES.get(kind.value_type if listed else kind)
        if dtype is None:
            raise DataError(name, f"no tensor holds {kind}; cast it to numbers or arrays of numbers")
        return listed, dtype


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """Rows of one rank in one step."""

    columns: Mapping[str, NDArray[Number]]
    rows: int
    weight: float  # see LocalPlan.weight


@dataclass(frozen=True, kw_only=True)
class ShardLoader:
    """Batches of the rows `rows` of a shard, by `plan`.

    With a seed, each epoch has its own order, a function of (seed, epoch, rank). Without one, rows have the order of
    `rows`.
    """

    columns: Mapping[str, RowColumn]
    rows: NDArray[np.int64]
    plan: LocalPlan
    rank: int
    seed: int | None

    def __post_init__(self) -> None:
        if len(self.rows) != self.plan.rows[self.rank]:
            raise ValueError(f"the plan gives rank {self.rank} {self.plan.rows[self.rank]} rows, not {len(self.rows)}")

    def take(self, rows: NDArray[np.int64], *, epoch: int = 0, step: int = 0) -> dict[str, NDArray[Number]]:
        """Return rows of the shard by column; subclasses may depend on `epoch` and `step`."""
        return {name: column.take(rows) for name, column in self.columns.items()}

    def epoch(self, epoch: int, first: int = 0) -> Iterator[ShardBatch]:
        """Yield the batches from step `first` on, the same number on every rank; a batch may have no rows."""
        order = self.rows
        if self.seed is not None:
            order = self.rows[permutation(len(self.rows), epoch, self.rank, seed=self.seed)]
        for step in range(first, self.plan.steps):
            begin, end = self.plan.bounds(self.rank, step)
            taken = self.take(order[begin:end], epoch=epoch, step=step)
            yield ShardBatch(taken, end - begin, self.plan.weight(self.rank, step))
