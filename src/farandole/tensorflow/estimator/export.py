"""Outputs that a model function exports for serving."""

from collections.abc import Mapping
from typing import TypeAlias

import tensorflow as tf

Tensor: TypeAlias = tf.Tensor


class ExportOutput:
    """Named tensors with one row for each row of the features."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        self.outputs = {name: _tensor(name, value) for name, value in outputs.items()}
        if not self.outputs:
            raise ValueError("an export output needs at least one tensor")


class PredictOutput(ExportOutput):
    """Any tensors: a dictionary of tensors, or one tensor, which is named "output"."""

    def __init__(self, outputs: Tensor | Mapping[str, Tensor]) -> None:
        super().__init__(outputs if isinstance(outputs, Mapping) else {"output": outputs})


class ClassificationOutput(ExportOutput):
    """Scores of classes, their names, or both, as "scores" and "classes"."""

    def __init__(self, scores: Tensor | None = None, classes: Tensor | None = None) -> None:
        given = {"scores": scores, "classes": classes}
        super().__init__({name: value for name, value in given.items() if value is not None})

    @property
    def scores(self) -> Tensor | None:
        """The scores; None if they were not given."""
        return self.outputs.get("scores")

    @property
    def classes(self) -> Tensor | None:
        """The classes; None if they were not given."""
        return self.outputs.get("classes")


class RegressionOutput(ExportOutput):
    """One number for each row, as "outputs"."""

    def __init__(self, value: Tensor) -> None:
        super().__init__({"outputs": value})

    @property
    def value(self) -> Tensor:
        """The numbers."""
        return self.outputs["outputs"]


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, tf.Tensor):
        raise ValueError(f"the export output {name!r} must be a tensor, got {type(value).__name__}")
    return value
