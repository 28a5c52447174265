"""Applies a PyTorch model to a DataFrame's rows, batch by batch, in Spark's Python workers."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import cloudpickle
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pyspark.ml.model_cache import ModelCache

from farandole.data import Number
from farandole.errors import DataError
from farandole.spark.trainers.torch_tensors import Inputs, outputs_of

Predict: TypeAlias = Callable[[list[NDArray[Number]]], list[NDArray[np.generic]]]

ROWS_AT_ONCE = 1024  # bounds the memory of the model's activations


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A pickled model and how to feed it; each Python worker unpickles the model once."""

    model: bytes
    inputs: Inputs
    label_cols: tuple[str, ...]
    names: tuple[str, ...]  # of the columns it gives, one per label
    key: uuid.UUID = field(default_factory=uuid.uuid4)

    def __call__(self, batches: Iterator[tuple[pd.Series, ...] | pd.Series]) -> Iterator[pd.DataFrame]:
        """Yield the outputs for each batch of feature columns; raises `DataError` for null and ragged rows."""
        predict = ModelCache.get(self.key)
        if predict is None:
            predict = self._load()
            ModelCache.add(self.key, predict)
        for batch in batches:
            # Spark gives a single column without its tuple, whatever the function's type says.
            columns_given = batch if isinstance(batch, tuple) else (batch,)
            rows = len(columns_given[0])
            if rows == 0:
                continue
            values = [self._array(index, series) for index, series in enumerate(columns_given)]
            parts = [
                predict([column[first : first + ROWS_AT_ONCE] for column in values])
                for first in range(0, rows, ROWS_AT_ONCE)
            ]
            columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
            yield pd.DataFrame({name: list(column) for name, column in zip(self.names, columns, strict=True)})

    def _load(self) -> Predict:
        model: torch.nn.Module = cloudpickle.loads(self.model)
        model.eval()

        def predict(values: list[NDArray[Number]]) -> list[NDArray[np.generic]]:
            with torch.inference_mode():
                given = model(*(self.inputs.tensor(index, each) for index, each in enumerate(values)))
            outputs = outputs_of(given, self.label_cols)
            return [_row_shaped(output.to(_held(output.dtype)).numpy()) for output in outputs]

        return predict

    def _array(self, index: int, series: pd.Series) -> NDArray[Number]:
        name = self.inputs.columns[index]
        if series.isna().any():
            raise DataError(name, f"{int(series.isna().sum())} of {len(series)} rows are null; fill or drop them first")
        try:
            array: NDArray[Number] = (
                np.stack(series.to_list()) if series.dtype == object else series.to_numpy(copy=True)
            )
        except ValueError as error:
            raise DataError(name, "arrays of different lengths; a tensor needs one length: pad or cut them") from error
        return array


def column_type(dtype: str, shape: tuple[int, ...]) -> str:
    """Return the Spark type of an output: a number for one number per row, an array for more."""
    number = {"float64": "double", "int64": "bigint", "int32": "int", "bool": "boolean"}.get(dtype, "float")
    return number if int(np.prod(shape)) == 1 else f"array<{number}>"


def _held(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a column holds the output."""
    exact = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
    return dtype if dtype in exact else torch.float32


def _row_shaped(values: NDArray[np.generic]) -> NDArray[np.generic]:
    flat = values.reshape(len(values), -1)
    return flat[:, 0] if flat.shape[1] == 1 else flat
