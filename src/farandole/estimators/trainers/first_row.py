"""Errors for a model or a loss that fails on the first row, before training."""

import math
from collections.abc import Sequence

from farandole.errors import ConfigError

# Errors that layers and losses raise for shapes or types that they do not take.
SHAPE_ERRORS = (IndexError, RuntimeError, TypeError, ValueError)
# Remedy for a model that takes fewer inputs than there are columns.
TOGETHER = (
    "put the columns together into one: pyspark.ml.feature.VectorAssembler does it in Spark, "
    'rows["x"] = rows[["a", "b"]].values.tolist() in pandas'
)


def first_line(error: Exception) -> str:
    """Return the class of `error` and the first line of its text."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def check_label_shape(own: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise `ConfigError` if rows of a label, of the shape `own`, do not have as many numbers as the `wanted` shape."""
    if math.prod(own) != math.prod(wanted):
        raise ConfigError(
            "label_shapes", f"has {list(wanted)} for the rows of a label whose shape is {list(own)}: make them equal"
        )


def refused_model(failure: str, inputs: str, remedy: str = f"give input_shapes, or {TOGETHER}") -> ConfigError:
    """Return the error for a model that fails on the first row; `inputs` describes the inputs that it was given."""
    return ConfigError("model", f"fails on the first row: {failure}. Its inputs: {inputs}; {remedy}")
