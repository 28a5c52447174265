"""A user's function of one row, which ranks apply to the rows of each batch."""

import random
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole.data import Gather, Number, RowColumn, ShardLoader
from farandole.data.transform import TransformSpec
from farandole.errors import ConfigError, DataError

Facts: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]  # of a column: its type, and the shape of one row

_SETTING = "transformation_fn"
_AT_ONCE = 1024  # rows that `kept` makes at once
# Two threads may make batches for training and validation at once: in Keras on TensorFlow, and with queues.
_GENERATORS = threading.Lock()

# Type of a result -> its type in batches.
_HELD = {
    "bool": "int8", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64", "uint8": "int16",
    "uint16": "int32", "uint32": "int64", "float16": "float32", "float32": "float32", "float64": "float64",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Transformation:
    """The function, with an estimator's settings for it, and the columns of the rows that it takes."""

    function: Callable[[dict[str, object]], object]
    edit_fields: tuple[tuple[object, ...], ...]  # (name, type, shape, nullable) of columns that it changes or adds
    removed_fields: tuple[str, ...]
    fed: tuple[str, ...]
    weight: str | None = None  # the column of the rows' weights, which has one number per row


@dataclass(frozen=True, kw_only=True)
class RowTransform:
    """Columns that a function makes from others, row by row.

    `random` and `numpy.random` are seeded before each batch, so a resumed run draws the same numbers as an
    uninterrupted one.
    """

    transformation: Transformation
    raw: Mapping[str, RowColumn]
    wanted: tuple[str, ...]
    facts: Facts
    seed: int
    rank: int

    def __call__(self, rows: NDArray[np.int64], turn: Sequence[int]) -> dict[str, NDArray[Number]]:
        """Return the wanted columns of these rows; `turn` identifies the batch and sets the seed.

        Raises `DataError` for a row whose types or shapes differ from the first row's, and the function's errors."""
        if not len(rows):
            return {name: np.empty((0, *shape), dtype) for name, (dtype, shape) in self.facts.items()}
        state = int(np.random.SeedSequence(self.seed, spawn_key=(*turn, self.rank, 2)).generate_state(1)[0])
        spec = TransformSpec(edit_fields=self.transformation.edit_fields)
        raw = {name: column.take(rows) for name, column in self.raw.items()}
        promised = dict.fromkeys([*self.wanted, *spec.edit_fields])
        given = [{name: cells[place] for name, cells in raw.items()} for place in range(len(rows))]
        with _GENERATORS:
            random.seed(state)
            np.random.seed(state)
            made = [self._row(row, promised) for row in given]
        columns = {}
        for name in self.wanted:
            values = _column(spec, name, [row[name] for row in made])
            columns[name] = values = _one_each(name, values) if name == self.transformation.weight else values
            dtype, shape = self.facts.get(name, (values.dtype.name, values.shape[1:]))
            if values.shape[1:] != shape or not _holds(dtype, values):
                raise DataError(
                    name,
                    f"{_SETTING} gives {_kind(values.dtype.name, values.shape[1:])}, and {_kind(dtype, shape)} for the "
                    "first row; give its type and shape in transformation_edit_fields",
                )
            columns[name] = values.astype(dtype, copy=False)
        return columns

    def kept(self, order: NDArray[np.int64], count: int) -> dict[str, NDArray[Number]]:
        """Return the wanted columns of `count` rows; the function runs on those in `order`, others are undefined."""
        columns = {name: np.empty((count, *shape), dtype) for name, (dtype, shape) in self.facts.items()}
        for first in range(0, len(order), _AT_ONCE):
            rows = order[first : first + _AT_ONCE]
            for name, values in self(rows, (0, first, 1)).items():
                columns[name][rows] = values
        return columns

    def kinds(self) -> dict[str, str]:
        """Return the type of each column as a text: {"x": "float32[28, 28]"}."""
        return {name: _kind(*facts) for name, facts in self.facts.items()}

    def _row(self, row: dict[str, object], promised: Iterable[str]) -> Mapping[str, object]:
        made = self.transformation.function(row)
        if not isinstance(made, Mapping):
            raise ConfigError(_SETTING, f"returns {type(made).__name__}, and has to return a row as a dict")
        missing = [name for name in promised if name not in made and name not in self.transformation.removed_fields]
        if missing:
            raise ConfigError(_SETTING, f"returns no {', '.join(missing)}, but {', '.join(map(str, made))}")
        return made


@dataclass(frozen=True, kw_only=True)
class TransformedLoader(ShardLoader):
    """A `ShardLoader` that applies a function to rows each time that they are taken."""

    transform: RowTransform
    validates: bool = False

    def take(self, rows: NDArray[np.int64], *, epoch: int = 0, step: int = 0) -> dict[str, NDArray[Number]]:
        """Return the columns that the function makes from these rows."""
        return self.transform(rows, (epoch, step, 3 if self.validates else 2))


def first_row_of_all(transform: RowTransform, rows: NDArray[np.int64], gather: Gather) -> Facts:
    """Return the types and shapes of the columns that the function makes from each rank's first row.

    `rows` are this rank's. Raises the same `ConfigError` or `DataError` on every rank if the function fails, does not
    return the promised columns, or returns other types or shapes on another rank. A collective."""
    mine, problem = _try_first(transform, rows[:1])
    every = gather((mine, problem))
    for rank, (_, failure) in enumerate(every):
        if failure:
            raise ConfigError(_SETTING, f"fails on the first row of rank {rank}: {failure}")
    found = {rank: facts for rank, (facts, _) in enumerate(every) if facts}
    if not found:
        raise DataError(transform.wanted[0], "there are no rows")
    first, agreed = min(found.items(), key=lambda each: each[0])
    for rank, facts in found.items():
        for name in transform.wanted:
            if facts[name] != agreed[name]:
                raise DataError(
                    name,
                    f"{_SETTING} gives {_kind(*agreed[name])} on rank {first}, {_kind(*facts[name])} on rank {rank}; "
                    "give its type and shape in transformation_edit_fields",
                )
    return agreed


def _try_first(transform: RowTransform, row: NDArray[np.int64]) -> tuple[Facts, str]:
    if not len(row):
        return {}, ""
    try:
        made = transform(row, (0, 0, 0))
        facts = {name: (values.dtype.name, tuple(values.shape[1:])) for name, values in made.items()}
    except (ConfigError, DataError) as error:
        return {}, str(error)
    except Exception as error:  # any error: the other ranks must raise it, too
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {}, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
    return facts, ""


def _column(spec: TransformSpec, name: str, cells: list[Any]) -> NDArray[Number]:
    """Return the results of one column as an array, rows first; raises `DataError` for results that no tensor holds."""
    nothing = sum(cell is None for cell in cells)
    if nothing:
        raise DataError(name, f"{_SETTING} gives None for {nothing} of {len(cells)} rows; a tensor holds numbers only")
    wanted = spec.edit_fields.get(name)
    if wanted is not None:
        shapes = sorted({np.shape(cell) for cell in cells if not _fits(np.shape(cell), wanted[1])})
        if shapes:
            raise DataError(
                name, f"{_SETTING} gives the shape {shapes[0]}, transformation_edit_fields promises {wanted[1]}"
            )
    try:
        values = spec.column(name, cells)
    except (OverflowError, TypeError, ValueError) as error:
        raise DataError(name, f"{_SETTING} gives results that form no array: {error}") from error
    if not isinstance(values, np.ndarray):
        raise DataError(name, f"{_SETTING} gives arrays of different lengths; a tensor needs one: pad or cut them")
    held = _HELD.get(values.dtype.name)
    if held is None:
        kind = type(cells[0]).__name__ if values.dtype == object else values.dtype.name
        remedy = f"return numbers or arrays of numbers, of a type among {', '.join(_HELD)}"
        raise DataError(name, f"{_SETTING} gives {kind}; {remedy}")
    return values.astype(held, copy=False)


def _one_each(name: str, weights: NDArray[Number]) -> NDArray[Number]:
    """Return weights in the shape (rows,). In (rows, 1) a product with the rows' losses would be rows x rows."""
    if weights.size != len(weights):
        kind = _kind(weights.dtype.name, weights.shape[1:])
        raise DataError(name, f"{_SETTING} gives {kind}; sample_weight_col holds one number per row")
    return weights.reshape(-1)


def _holds(dtype: str, values: NDArray[Number]) -> bool:
    """Return whether the type holds these values; floating-point numbers may be rounded, integers may not."""
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        return False
    return values.dtype.kind != "i" or np.array_equal(values.astype(dtype).astype(values.dtype), values)


def _fits(shape: tuple[int, ...], promised: tuple[int | None, ...]) -> bool:
    if len(shape) != len(promised):
        # A single number may also be an array of one item.
        return int(np.prod(shape)) == 1 and all(size in (1, None) for size in promised)
    return all(want in (None, size) for size, want in zip(shape, promised, strict=True))


def _kind(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{[*shape]}" if shape else dtype
