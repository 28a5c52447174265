"""Predictions of a model for a DataFrame's rows, batch by batch, in Spark's Python workers."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyspark.ml.model_cache import ModelCache

from farandole.data import Number
from farandole.errors import ConfigError, DataError

Predict: TypeAlias = Callable[[list[NDArray[Number]]], list[NDArray[np.generic]]]

ROWS_AT_ONCE = 1024  # bounds the memory of the model's activations


@dataclass(frozen=True, kw_only=True)
class BatchPredictor(ABC):
    """A pickled model that each Python worker loads once. A framework's subclass adds `columns` and `load`."""

    names: tuple[str, ...]  # of the columns of predictions, one per label
    key: uuid.UUID = field(default_factory=uuid.uuid4)

    @property
    @abstractmethod
    def columns(self) -> Sequence[str]:
        """The names of the feature columns."""

    @abstractmethod
    def load(self) -> Predict:
        """Load the model; return a function from the arrays of the feature columns to an array per output."""

    def __call__(self, batches: Iterator[tuple[pd.Series, ...] | pd.Series]) -> Iterator[pd.DataFrame]:
        """Yield the outputs for each batch of feature columns without nulls; raises `DataError` for ragged rows."""
        predict = ModelCache.get(self.key)
        if predict is None:
            predict = self.load()
            ModelCache.add(self.key, predict)
        for batch in batches:
            # Spark passes a single column without a tuple, in spite of the function's type.
            columns_given = batch if isinstance(batch, tuple) else (batch,)
            rows = len(columns_given[0])
            if rows == 0:
                continue
            values = self.arrays(columns_given)
            parts = [
                [
                    self.row_shaped(place, each)
                    for place, each in enumerate(
                        self._predicted(predict, [column[first : first + ROWS_AT_ONCE] for column in values])
                    )
                ]
                for first in range(0, rows, ROWS_AT_ONCE)
            ]
            columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
            yield pd.DataFrame({name: _series(column) for name, column in zip(self.names, columns, strict=True)})

    def named(self, place: int) -> tuple[str, str]:
        """Return the setting that the output at `place` comes from, and the output's name, for errors."""
        return "model", "an output" if len(self.names) == 1 else f"output {place}"

    def _predicted(self, predict: Predict, values: list[NDArray[Number]]) -> list[NDArray[np.generic]]:
        """Return the outputs for some rows; raises `ConfigError` for an output that does not have one item per row."""
        rows, outputs = len(values[0]), predict(values)
        for place, each in enumerate(outputs):
            if each.ndim == 0 or len(each) != rows:
                setting, name = self.named(place)
                problem = f"{name} has the shape {list(each.shape)} for {rows} rows; transform needs one row each"
                raise ConfigError(setting, problem)
        return outputs

    def row_shaped(self, place: int, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return one number, or one array of numbers, for each row of the output at `place`."""
        flat = values.reshape(len(values), -1)
        return flat[:, 0] if flat.shape[1] == 1 else flat

    def outputs(self, row: tuple[pd.Series, ...]) -> list[tuple[str, list[int]]]:
        """Return the type and the shape of one row of each output."""
        return [(each.dtype.name, [*each.shape[1:]]) for each in self._predicted(self.load(), self.arrays(row))]

    def arrays(self, columns: Sequence[pd.Series]) -> list[NDArray[Number]]:
        """Return the feature columns without nulls as arrays, rows first; raises `DataError` for ragged rows."""
        return [_array(name, series) for name, series in zip(self.columns, columns, strict=True)]


def in_column_type(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return an output in a type that a column can hold: float32 in place of other numbers."""
    held = ("float32", "float64", "int32", "int64", "bool", "object")
    return values if values.dtype.name in held else values.astype(np.float32)


def column_type(dtype: str, shape: Sequence[int]) -> str:
    """Return the Spark type of an output: a number for one number per row, an array for more."""
    number = {"float64": "double", "int64": "bigint", "int32": "int", "bool": "boolean"}.get(dtype, "float")
    return number if int(np.prod(shape)) == 1 else f"array<{number}>"


def _array(name: str, series: pd.Series) -> NDArray[Number]:
    if isinstance(first := series.iloc[0], (str, bytes, bytearray)):
        texts = [each.encode() for each in series] if isinstance(first, str) else [bytes(each) for each in series]
        return np.array(texts, object)  # only graphs with inputs of strings get them
    if series.dtype != object:
        numbers: NDArray[Number] = series.to_numpy(copy=True)
        return numbers
    rows = series.to_list()
    if len(set(map(len, rows))) > 1:
        raise DataError(name, "arrays of different lengths; a tensor needs one length: pad or cut them")
    # A third of the time of np.stack, which examines the shape of each array.
    return np.concatenate(rows).reshape(len(rows), -1)


def _series(values: NDArray[np.generic]) -> "NDArray[np.generic] | list[NDArray[np.generic]]":
    """Return a column of a DataFrame: an array of numbers as it is, otherwise a list with an array per row."""
    return values if values.ndim == 1 else list(values)
