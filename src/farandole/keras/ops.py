"""Operations on numbers, arrays, and the tensors and variables of Keras' backend."""

import keras
import numpy as np

import farandole.numpy as on_numpy
from farandole.core.operations.compression import Compressor
from farandole.core.operations.reduction import Average, choose_reduction
from farandole.keras.backend import Options, Tensor, value_of
from farandole.keras.chosen import backend
from farandole.keras.compression import Compression

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]


def allreduce(
    value: Tensor,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor[Tensor] = Compression.none,
) -> Tensor:
    """Reduce `value` over all ranks; every rank gets the same result, as a tensor if `value` is one, else as an array.

    Blocks until every rank has made the request."""
    reduction = choose_reduction(op, average, prescale_factor, postscale_factor)
    tensor = backend().is_tensor(value)
    if tensor or compression is not Compression.none:
        # Only tensors can be compressed.
        options = Options(reduction=reduction, compression=compression)
        reduced = backend().allreduce(value if tensor else keras.ops.convert_to_tensor(value), name, options)
        return reduced if tensor else keras.ops.convert_to_numpy(reduced)
    return on_numpy.allreduce(
        np.asarray(value),
        name=name,
        op=reduction.op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Tensor, name: str | None = None) -> Tensor:
    """Concatenate the ranks' values by rank along the first dimension, which may differ between ranks.

    Blocks until every rank has made the request."""
    if backend().is_tensor(value):
        return backend().hvd.allgather(value_of(value), name=name)
    return on_numpy.allgather(np.asarray(value), name=name)


def broadcast(value: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return the value of rank `root_rank`; the ranks' shapes and dtypes must be equal.

    Blocks until the root's value has arrived."""
    if backend().is_tensor(value):
        return backend().hvd.broadcast(value_of(value), root_rank, name=name)
    return on_numpy.broadcast(np.asarray(value), root_rank, name=name)


def reducescatter(value: Tensor, name: str | None = None, op: int = Average) -> Tensor:
    """Reduce `value` over all ranks (Average or Sum) and return this rank's rows of the result.

    Blocks until every rank has made the request."""
    if backend().is_tensor(value):
        return backend().hvd.reducescatter(value_of(value), name=name, op=op)
    return on_numpy.reducescatter(np.asarray(value), name=name, op=op)
