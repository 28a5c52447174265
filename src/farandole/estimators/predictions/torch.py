"""Predictions of a PyTorch model for batches of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray

from farandole.data import Number
from farandole.estimators.predictions.batches import BatchPredictor, Predict
from farandole.estimators.trainers.torch.tensors import Inputs, outputs_of


@dataclass(frozen=True, kw_only=True)
class Predictor(BatchPredictor):
    """A pickled model and the conversion of columns to its inputs."""

    model: bytes
    inputs: Inputs
    label_cols: tuple[str, ...]

    @property
    def columns(self) -> Sequence[str]:
        """The names of the feature columns."""
        return self.inputs.columns

    def load(self) -> Predict:
        """Unpickle the model; return a function that runs it on arrays of the feature columns."""
        model: torch.nn.Module = cloudpickle.loads(self.model)
        model.eval()

        def predict(values: list[NDArray[Number]]) -> list[NDArray[np.generic]]:
            with torch.inference_mode():
                given = model(*(self.inputs.tensor(index, each) for index, each in enumerate(values)))
            return [output.to(_column_dtype(output.dtype)).numpy() for output in outputs_of(given, self.label_cols)]

        return predict


def _column_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a column holds the output."""
    exact = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
    return dtype if dtype in exact else torch.float32
