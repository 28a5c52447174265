"""Conversion of columns to a PyTorch model's inputs and labels, the same in training and in `transform`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farandole.data import Number
from farandole.errors import ConfigError, DataError
from farandole.estimators.trainers.first_row import check_label_shape


@dataclass(frozen=True, slots=True)
class Output:
    """One of a model's outputs: its type, "float32" for example, and the shape of one row."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Output":
        """Describe an output of the model for a batch."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Conversion of feature columns to the model's inputs: one tensor per column, cast to the parameters' type."""

    columns: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] | None  # -1 first, for the rows
    dtype: torch.dtype

    def describe(self, kinds: Mapping[str, str]) -> str:
        """Return a text with the type of each column, and the type and shape of the input that it becomes."""
        return ", ".join(
            f"{name} {kinds[name]} as {spell(self.dtype)} {self._shape(index, kinds[name])}"
            for index, name in enumerate(self.columns)
        )

    def _shape(self, index: int, kind: str) -> str:
        if self.shapes is None:
            _, listed, width = kind.partition("[")
            return f"[rows, {width}" if listed else "[rows]"
        return f"[{', '.join(['rows', *map(str, self.shapes[index][1:])])}]"

    def tensor(self, index: int, values: NDArray[Number]) -> Tensor:
        """Return one input; raises `DataError` for integers that the type cannot hold and shapes that do not fit."""
        name, numbers = self.columns[index], torch.from_numpy(values)
        cast = numbers.to(self.dtype)
        if not numbers.is_floating_point() and not torch.equal(cast.to(numbers.dtype), numbers):
            raise DataError(name, f"holds integers that {spell(self.dtype)} cannot hold; number them from 0")
        if self.shapes is None:
            return cast
        try:
            return cast.reshape(len(values), *self.shapes[index][1:])
        except RuntimeError as error:
            row = list(values.shape[1:])
            raise DataError(name, f"rows of shape {row} do not fit input shape {self.shapes[index]}") from error


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Return the type that inputs are cast to: that of the first floating-point parameter, or else buffer.

    A model without them, such as a formula or a quantized model, takes PyTorch's default type."""
    floating = (each.dtype for each in chain(model.parameters(), model.buffers()) if each.is_floating_point())
    return next(floating, torch.get_default_dtype())


def check_parameters(model: torch.nn.Module) -> None:
    """Raise `ConfigError` for a model without a floating-point parameter, which no optimizer trains."""
    if not any(each.is_floating_point() for each in model.parameters()):
        raise ConfigError("model", "has no parameters to train")


def spell(dtype: torch.dtype) -> str:
    """Return the type's name without the module."""
    return str(dtype).removeprefix("torch.")


def outputs_of(given: object, labels: Sequence[str]) -> list[Tensor]:
    """Return a model's outputs as one tensor per label column; raises `ConfigError` for other results."""
    all_given = list(given) if isinstance(given, (tuple, list)) else [given]
    outputs = [each for each in all_given if isinstance(each, Tensor)]
    if len(outputs) != len(labels) or len(outputs) != len(all_given):
        kinds = ", ".join(type(each).__name__ for each in all_given)
        raise ConfigError("model", f"gives {kinds}; label_cols {list(labels)} need one tensor each")
    return outputs


def label_tensor(label: NDArray[np.generic], dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
    """Return a label before its output is known: integers as int64, other numbers as `dtype`.

    The first number of `shape` stands for the rows. Raises `ConfigError` for labels of another number of numbers."""
    tensor = torch.from_numpy(label)
    tensor = tensor.to(dtype if tensor.is_floating_point() else torch.int64)
    if shape is None:
        return tensor
    check_label_shape(label.shape[1:], shape[1:])
    return tensor.reshape(len(label), *shape[1:])


def as_output(label: Tensor, output: Tensor) -> Tensor:
    """Return the label in the output's shape and type if it has as many numbers, otherwise unchanged.

    A loss would broadcast (rows,) against (rows, 1) to rows x rows, and refuse integers."""
    return label.reshape(output.shape).to(output.dtype) if label.numel() == output.numel() else label


def fit_label(
    label: NDArray[np.generic], output: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> Tensor:
    """Return a label as the loss takes it: in `shape`, or else in the shape of its output if that fits."""
    if shape is not None:
        return label_tensor(label, dtype, shape)
    tensor = torch.from_numpy(label)
    return as_output(tensor, output) if tensor.numel() == output.numel() else label_tensor(label, dtype)
