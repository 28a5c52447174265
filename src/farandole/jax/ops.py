"""Operations for JAX, on arrays and pytrees of arrays, outside of jax.jit and inside."""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from farandole.core.operations import ops as outside
from farandole.core.operations.compression import (
    BrainCompression,
    CastCompressor,
    Compressor,
    Int8Compressor,
    NoneCompressor,
)
from farandole.core.operations.ops import Operations
from farandole.core.operations.reduction import Average
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.errors import InvalidRequest
from farandole.jax.adapter import Array, JaxAdapter, keys_of, numbers_of
from farandole.jax.differentiable import Differentiable
from farandole.jax.traced import joins_program

__all__ = [
    "Compression",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

Tree = TypeVar("Tree")

_adapter = JaxAdapter()
_operations: Operations[Array] = Operations(Differentiable(_adapter))

Compression: BrainCompression[Array] = BrainCompression(
    none=NoneCompressor(),
    fp16=CastCompressor(_adapter, jnp.dtype(jnp.float16)),
    bf16=CastCompressor(_adapter, jnp.dtype(jnp.bfloat16)),
    int8=Int8Compressor(_adapter, jnp.dtype(jnp.float32)),
)


def allreduce(
    tree: Tree,
    op: int = Average,
    name: str | None = None,
    compression: Compressor[Array] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tree:
    """Reduce an array, or all arrays of a pytree together, over all ranks; every rank gets the same result.

    See `farandole.core.operations.ops` for `op` and the errors. Outside of jax.jit it blocks until every rank has made
    the request. Inside, it becomes part of the program, which blocks when it runs, and raises
    `jax.errors.JaxRuntimeError`. All ops but Adasum are differentiable.
    """
    leaves, form = jax.tree.flatten(tree)
    # Integers have no gradients, for which jax.grad returns arrays without values.
    held = [place for place, leaf in enumerate(leaves) if getattr(leaf, "dtype", None) != jax.dtypes.float0]
    if len(held) == 1:
        whole = _operations.allreduce(
            _array(leaves[held[0]]), None, name, compression, op, prescale_factor, postscale_factor, process_set
        )
        reduced = [whole]
    else:
        arrays = [leaves[place] for place in held]
        reduced = grouped_allreduce(arrays, op, name, compression, prescale_factor, postscale_factor, process_set)
    for place, array in zip(held, reduced, strict=True):
        leaves[place] = array
    tree = jax.tree.unflatten(form, leaves)
    return tree


def grouped_allreduce(
    arrays: Sequence[object],
    op: int = Average,
    name: str | None = None,
    compression: Compressor[Array] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Reduce several arrays together, as `allreduce`; none begins before all are requested on all ranks."""
    if not len(arrays):
        return []
    return _operations.grouped_allreduce(
        list(map(_array, arrays)), None, name, compression, op, prescale_factor, postscale_factor, process_set
    )


def allgather(array: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Concatenate the ranks' arrays by rank along the first dimension, which may differ between ranks.

    Inside jax.jit it must be the same on all ranks, because shapes are fixed when a program is traced. Otherwise the
    program fails."""
    return _operations.allgather(_array(array), name, process_set)


def grouped_allgather(
    arrays: Sequence[object], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Gather several arrays together, as `allgather`; none begins before all are requested on all ranks."""
    return _operations.grouped_allgather(list(map(_array, arrays)), name, process_set) if len(arrays) else []


def broadcast(
    tree: Tree, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tree:
    """Return the array, or the pytree of arrays, of rank `root_rank`; all ranks' shapes and dtypes must be equal."""
    leaves, form = jax.tree.flatten(tree)
    given = [_array(leaf) for leaf in leaves]
    arrays = [numbers_of(array) for array in given]
    names: list[str | None] = [name] if len(arrays) == 1 else [name and f"{name}.{i}" for i in range(len(arrays))]
    if joins_program(*arrays):
        spread = [
            _operations.broadcast(array, root_rank, each, process_set)
            for array, each in zip(arrays, names, strict=True)
        ]
    else:
        handles = [
            _operations.broadcast_async(array, root_rank, each, process_set)
            for array, each in zip(arrays, names, strict=True)
        ]
        spread = [handle.wait() for handle in handles]
    tree = jax.tree.unflatten(form, list(map(keys_of, spread, given)))
    return tree


def alltoall(
    array: object, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array | tuple[Array, Array]:
    """Send `splits[r]` rows to each rank r, in order, and return the received rows in rank order.

    Without `splits` every rank gets an equal part. With `splits`, which cannot be given inside jax.jit, the result is a
    pair: the rows, and the number of rows from each rank."""
    return _operations.alltoall(_array(array), splits, name, process_set)


def reducescatter(
    array: object,
    op: int = Average,
    name: str | None = None,
    compression: Compressor[Array] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce the array over all ranks (Average or Sum) and return this rank's rows of the result.

    If the rows do not divide evenly, the first ranks get one row more."""
    return _operations.reducescatter(
        _array(array), name, compression, op, process_set, prescale_factor, postscale_factor
    )


def grouped_reducescatter(
    arrays: Sequence[object],
    op: int = Average,
    name: str | None = None,
    compression: Compressor[Array] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Scatter several arrays together, as `reducescatter`; none begins before all are requested on all ranks."""
    if not len(arrays):
        return []
    return _operations.grouped_reducescatter(
        list(map(_array, arrays)), name, compression, op, process_set, prescale_factor, postscale_factor
    )


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank has called it. It does not wait for operations in flight.

    Raises `InvalidRequest` within a program, such as a function under jax.jit: it would run once, when that is
    traced."""
    _require_no_program("barrier")
    outside.barrier(process_set)


def join(device: int = -1) -> int:
    """Declare that this rank has no more data; see `farandole.core.operations.ops.join`, and `barrier` for programs."""
    _require_no_program("join")
    return outside.join(device)


def _require_no_program(what: str) -> None:
    if joins_program():
        raise InvalidRequest(what, "it works outside of jax.jit only; within, it would run once, during tracing")


def _array(given: object) -> Array:
    """Return `given` as an array of JAX; raises `OverflowError` for numbers that its dtype there does not hold."""
    if isinstance(given, jax.Array):
        return given
    held = np.asarray(given)
    if held.dtype.kind in "iuf" and (dtype := jax.dtypes.canonicalize_dtype(held.dtype)) != held.dtype:
        # JAX makes 32 bits of 64 without a word, unless jax_enable_x64 is set.
        known = held[np.isfinite(held)] if held.dtype.kind == "f" else held
        limits = np.finfo(dtype) if held.dtype.kind == "f" else np.iinfo(dtype)
        if known.size and (known.min() < limits.min or known.max() > limits.max):
            raise OverflowError(f"{known.min()} to {known.max()} do not fit into {dtype}; set jax_enable_x64")
    return jnp.asarray(given)
