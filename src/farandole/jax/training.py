"""Distributed training with JAX: reduction of gradients, and broadcast of parameters."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from farandole.core.operations.compression import Compressor
from farandole.core.operations.gradients import predivided
from farandole.core.operations.objects import allgather_object
from farandole.core.operations.reduction import Average
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.errors import MismatchError
from farandole.jax.adapter import Array
from farandole.jax.ops import Compression, allreduce, broadcast
from farandole.jax.traced import joins_program

Tree = TypeVar("Tree")


class Optimizer(Protocol):
    """Optimizer of Optax, or any object with these two functions."""

    @property
    def init(self) -> Callable[..., object]:
        """Function that makes the state for parameters."""

    @property
    def update(self) -> Callable[..., object]:
        """Function that makes updates and the next state from gradients, a state and parameters."""


class GradientTransformation(NamedTuple):
    """Optimizer in the form of Optax."""

    init: Callable[..., object]
    update: Callable[..., object]


def DistributedOptimizer(
    optimizer: Optimizer,
    op: int = Average,
    compression: Compressor[Array] = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> GradientTransformation:
    """Return an optimizer that reduces the gradients over all ranks before each update, in one allreduce.

    It takes optimizers of Optax, inside jax.jit and outside, and has the type of `optimizer` if that is a named tuple.
    The state stays equal on all ranks if it was equal before. Raises `ValueError` for a factor without Average, or one
    that is not positive."""
    _, prescale, postscale = predivided(op, gradient_predivide_factor)

    def update(updates: object, state: object, params: object = None, **extra: object) -> object:
        reduced = allreduce(updates, op, None, compression, prescale, postscale, process_set)
        return optimizer.update(reduced, state, params, **extra)

    if hasattr(optimizer, "_replace"):
        replaced: GradientTransformation = optimizer._replace(update=update)
        return replaced
    return GradientTransformation(optimizer.init, update)


def value_and_grad(
    fun: Callable[..., object],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    op: int = Average,
    compression: Compressor[Array] = Compression.none,
    process_set: ProcessSet = global_process_set,
    **more: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Return a function like that of `jax.value_and_grad`, whose gradients are reduced over all ranks in one call.

    The value stays this rank's own."""
    local = jax.value_and_grad(fun, argnums, has_aux, **more)

    def reduced(*args: object, **kwargs: object) -> tuple[object, object]:
        value, grads = local(*args, **kwargs)
        return value, allreduce(grads, op, None, compression, process_set=process_set)

    return reduced


def grad(
    fun: Callable[..., object],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    op: int = Average,
    compression: Compressor[Array] = Compression.none,
    process_set: ProcessSet = global_process_set,
    **more: Any,
) -> Callable[..., Any]:
    """Return a function like that of `jax.grad`, whose gradients are reduced over all ranks in one call."""
    both = value_and_grad(fun, argnums, has_aux, op, compression, process_set, **more)

    def reduced(*args: object, **kwargs: object) -> object:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return reduced


def broadcast_parameters(params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Return the parameters, or another pytree of arrays such as an optimizer's state, of rank `root_rank`.

    Blocks until the root's arrays have arrived. Raises `MismatchError` on all ranks if their pytrees have leaves at
    different paths; within a program every rank must give a pytree of the same structure."""
    if not joins_program(*jax.tree.leaves(params)):
        _require_one_structure(params, process_set)
    return broadcast(params, root_rank, "parameters", process_set)


def _require_one_structure(params: object, process_set: ProcessSet) -> None:
    # Arrays are matched by their places: those of other parameters with equal shapes would be taken for one's own.
    mine = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    by_rank = allgather_object(mine, "parameters.structure", process_set)
    for leaves in zip_longest(*by_rank, fillvalue="no more leaves"):
        if len(set(leaves)) > 1:
            ranks = process_set.ranks
            assert ranks is not None  # the set is registered, as the allgather has shown
            raise MismatchError("parameters", dict(zip(ranks, leaves, strict=True)), "structure")
