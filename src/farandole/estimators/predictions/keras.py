"""Predictions of a Keras model for batches of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farandole.data import Number
from farandole.estimators.predictions.batches import BatchPredictor, Predict, in_column_type
from farandole.estimators.trainers.keras.model import Inputs, choose_backend, load_model, outputs_of


@dataclass(frozen=True, kw_only=True)
class KerasPredictor(BatchPredictor):
    """A saved model, its custom objects, and the backend that it runs on."""

    model: bytes
    backend: str
    inputs: Inputs

    @property
    def columns(self) -> Sequence[str]:
        """The names of the feature columns."""
        return self.inputs.columns

    def load(self) -> Predict:
        """Load the model on its backend; raises `ConfigError` in a process where Keras runs on another one."""
        choose_backend(self.backend)
        model = load_model(self.model)

        def predict(values: list[NDArray[Number]]) -> list[NDArray[np.generic]]:
            given = self.inputs.arrays(dict(zip(self.inputs.columns, values, strict=True)))
            return [in_column_type(np.asarray(each)) for each in outputs_of(model.predict_on_batch(given))]

        return predict
