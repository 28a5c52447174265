"""Predictions of a TensorFlow graph for a DataFrame's rows, in Spark's Python workers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farandole.data import Number
from farandole.errors import ConfigError
from farandole.estimators.predictions.batches import BatchPredictor, Predict, in_column_type
from farandole.estimators.trainers.keras.model import Inputs
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph, Port

_SMALL = ("int8", "uint8", "int16", "uint16")  # columns of int hold them; a column of booleans is fed as int8


@dataclass(frozen=True, kw_only=True)
class GraphPredictor(BatchPredictor):
    """A frozen graph, the columns that it takes, and its outputs."""

    frozen: FrozenGraph
    inputs: Sequence[tuple[str, str]]  # (column, name of the graph's input)
    outputs_of_graph: Sequence[str]  # names of the graph's outputs, one for each of `names`

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns."""
        return [column for column, _ in self.inputs]

    def load(self) -> Predict:
        """Import the graph into a new session, which the worker keeps; return a function that runs it."""
        import tensorflow as tf

        graph = tf.Graph()
        with graph.as_default():
            definition = tf.compat.v1.GraphDef.FromString(self.frozen.graph)
            tf.graph_util.import_graph_def(definition, name="")
        session = tf.compat.v1.Session(graph=graph)
        session.run(list(self.frozen.fills))
        ports = [self.frozen.inputs[name] for _, name in self.inputs]
        fetched = [self.frozen.outputs[name].tensor for name in self.outputs_of_graph]
        taken = Inputs(
            columns=tuple(self.columns),
            dtypes=tuple(each.dtype for each in ports),
            shapes=tuple(each.shape for each in ports),
        )

        def predict(values: list[NDArray[Number]]) -> list[NDArray[np.generic]]:
            arrays = taken.arrays(dict(zip(self.columns, values, strict=True)))
            fed = arrays if len(ports) > 1 else (arrays,)
            feeds = {each.tensor: array for each, array in zip(ports, fed, strict=True)}
            return [_in_column_type(np.asarray(result)) for result in session.run(fetched, feeds)]

        return predict

    def named(self, place: int) -> tuple[str, str]:
        """Return the setting and the output's tensor."""
        return "outputMapping", self.frozen.outputs[self.outputs_of_graph[place]].tensor

    def row_shaped(self, place: int, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return a number, a string or an array for each row, as the graph declares the output."""
        port = self.frozen.outputs[self.outputs_of_graph[place]]
        flat = values.reshape(len(values), -1)
        if port.dtype == "string":
            flat = np.array([[_text(each) for each in row] for row in flat], object).reshape(flat.shape)
        return flat[:, 0] if port.is_scalar else flat


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _in_column_type(values: NDArray[np.generic]) -> NDArray[np.generic]:
    return values.astype(np.int32) if values.dtype.name in _SMALL else in_column_type(values)


def output_type(port: Port) -> str:
    """Return the Spark type of an output; raises `ConfigError` for a type that no column holds."""
    held = {
        "float32": "float", "float16": "float", "bfloat16": "float", "float64": "double", "int64": "bigint",
        "int32": "int", "bool": "boolean", "string": "string", **dict.fromkeys(_SMALL, "int"),
    }  # fmt: skip
    if port.dtype not in held:
        raise ConfigError("outputMapping", f"{port.tensor} is {port.dtype}; cast it to one of {', '.join(held)}")
    return held[port.dtype] if port.is_scalar else f"array<{held[port.dtype]}>"
