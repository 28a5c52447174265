"""Broadcast of one rank's Keras variables to the others."""

from collections.abc import Iterable
from typing import NoReturn

import keras
import numpy as np

from farandole.keras.backend import Variable
from farandole.numpy import broadcast_async_


def broadcast_variables(variables: Iterable[Variable], root_rank: int) -> None:
    """Overwrite Keras variables with those of rank `root_rank`, matched by their order.

    A model has two lists: `model.weights`, and `model.optimizer.variables` once the optimizer is built. Blocks until
    all values have arrived. Raises `MismatchError` if ranks have different variables."""
    held = list(variables)
    # Copies, because some backends return views of their own memory.
    arrays = [np.array(keras.ops.convert_to_numpy(variable), order="C") for variable in held]
    # Other dtypes are sent as bytes.
    sent = [array if array.dtype.kind in "biuf" else array.reshape(-1).view(np.uint8) for array in arrays]
    handles = [broadcast_async_(array, root_rank, f"variable.{place}") for place, array in enumerate(sent)]
    for handle in handles:
        handle.wait()
    for variable, array in zip(held, arrays, strict=True):
        variable.assign(array)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise `RuntimeError`, as Horovod does in eager mode. Keras 3 has no list of all variables."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution. Use BroadcastGlobalVariablesCallback("
        f"{root_rank}), or broadcast_variables(model.weights + model.optimizer.variables, {root_rank})"
    )
