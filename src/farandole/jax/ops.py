"""The operations for JAX: on arrays and pytrees of them, at once or inside programs that jax.jit compiles."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from farandole.core.operations.compression import CastCompressor, Compressor, NoneCompressor
from farandole.core.operations.compression import Compression as Compressors
from farandole.core.operations.ops import Operations
from farandole.core.operations.reduction import Average
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.jax.adapter import Array, JaxAdapter
from farandole.jax.differentiable import Differentiable

__all__ = [
    "Compression",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

Tree = TypeVar("Tree")

_adapter = JaxAdapter()
_operations: Operations[Array] = Operations(Differentiable(_adapter))

Compression: Compressors[Array] = Compressors(
    none=NoneCompressor(), fp16=CastCompressor(_adapter, jnp.dtype(jnp.float16))
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
    """Combine an array, or all arrays of a pytree at once, over all ranks; every rank gets the same result.

    See `farandole.core.operations.ops` for `op` and the errors. Outside of jax.jit it blocks until every rank has
    asked. Inside it becomes part of the program, which waits when it runs, and raises `jax.errors.JaxRuntimeError`.
    Differentiable but for Adasum.
    """
    leaves, form = jax.tree.flatten(tree)
    if len(leaves) == 1:
        whole = _operations.allreduce(
            _array(leaves[0]), None, name, compression, op, prescale_factor, postscale_factor, process_set
        )
        reduced = [whole]
    else:
        reduced = grouped_allreduce(leaves, op, name, compression, prescale_factor, postscale_factor, process_set)
    tree = jax.tree.unflatten(form, reduced)
    return tree


def grouped_allreduce(
    arrays: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    compression: Compressor[Array] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Combine several arrays at once; none begins before all are ready on all ranks. As `allreduce`."""
    if not len(arrays):
        return []
    return _operations.grouped_allreduce(
        list(map(_array, arrays)), None, name, compression, op, prescale_factor, postscale_factor, process_set
    )


def allgather(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Concatenate the ranks' arrays by rank along the first dimension, which may differ between ranks.

    Inside jax.jit, where shapes are known beforehand, it may not: the program fails."""
    return _operations.allgather(_array(array), name, process_set)


def grouped_allgather(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Do what `allgather` does with several arrays at once; none begins before all are ready on all ranks."""
    return _operations.grouped_allgather(list(map(_array, arrays)), name, process_set) if len(arrays) else []


def broadcast(
    tree: Tree, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tree:
    """Return the array, or the pytree of arrays, of rank `root_rank`; all must have the same shapes and dtypes."""
    leaves, form = jax.tree.flatten(tree)
    arrays = [_array(leaf) for leaf in leaves]
    names: list[str | None] = [name] if len(arrays) == 1 else [name and f"{name}.{i}" for i in range(len(arrays))]
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
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
    tree = jax.tree.unflatten(form, spread)
    return tree


def alltoall(
    array: Any, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array | tuple[Array, Array]:
    """Send `splits[r]` rows to each rank r, in order, and return what came, in order of rank.

    Without `splits` every rank gets an equal part. With it, which is for calls outside of jax.jit, the result is a
    pair: the rows, and how many of them came from each rank."""
    return _operations.alltoall(_array(array), splits, name, process_set)


def reducescatter(
    array: Any,
    op: int = Average,
    name: str | None = None,
    compression: Compressor[Array] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Combine the array over all ranks (Average or Sum) and return this rank's rows of the result.

    The first ranks get one row more where the rows do not divide evenly."""
    return _operations.reducescatter(
        _array(array), name, compression, op, process_set, prescale_factor, postscale_factor
    )


def grouped_reducescatter(
    arrays: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    compression: Compressor[Array] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Do what `reducescatter` does with several arrays at once; none begins before all are ready."""
    if not len(arrays):
        return []
    return _operations.grouped_reducescatter(
        list(map(_array, arrays)), name, compression, op, process_set, prescale_factor, postscale_factor
    )


def _array(given: Any) -> Array:
    return given if isinstance(given, jax.Array) else jnp.asarray(given)
