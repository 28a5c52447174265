"""Distributed training with JAX: reduced gradients, and equal parameters to start from."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from farandole.core.operations.compression import Compressor
from farandole.core.operations.gradients import predivided
from farandole.core.operations.reduction import Average
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.jax.adapter import Array
from farandole.jax.ops import Compression, allreduce, broadcast

__all__ = ["DistributedOptimizer", "GradientTransformation", "broadcast_parameters", "grad", "value_and_grad"]

Tree = TypeVar("Tree")


class Optimizer(Protocol):
    """Optax's idea of an optimizer; any object with these two functions is one."""

    @property
    def init(self) -> Callable[..., Any]:
        """Make the state for parameters."""

    @property
    def update(self) -> Callable[..., Any]:
        """Make updates and the next state from gradients, a state and parameters."""


class GradientTransformation(NamedTuple):
    """An optimizer as Optax has it."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def DistributedOptimizer(
    optimizer: Optimizer,
    op: int = Average,
    compression: Compressor[Array] = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer, of the same type where that is a named tuple, whose updates begin with one allreduce.

    Works with what Optax makes, inside jax.jit and outside. Gradients of all ranks are reduced in one call; the state
    stays equal on all ranks if it was so before. Raises `ValueError` for a factor without Average, or not above 0."""
    _, prescale, postscale = predivided(op, gradient_predivide_factor)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        reduced = allreduce(updates, op, None, compression, prescale, postscale, process_set)
        return optimizer.update(reduced, state, params, **extra)

    if hasattr(optimizer, "_replace"):
        return optimizer._replace(update=update)
    return GradientTransformation(optimizer.init, update)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    op: int = Average,
    compression: Compressor[Array] = Compression.none,
    process_set: ProcessSet = global_process_set,
    **more: Any,
) -> Callable[..., Any]:
    """Return what `jax.value_and_grad` returns, but for gradients that are reduced over all ranks in one call.

    The value stays this rank's own."""
    local = jax.value_and_grad(fun, argnums, has_aux, **more)

    def reduced(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, grads = local(*args, **kwargs)
        return value, allreduce(grads, op, None, compression, process_set=process_set)

    return reduced


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    op: int = Average,
    compression: Compressor[Array] = Compression.none,
    process_set: ProcessSet = global_process_set,
    **more: Any,
) -> Callable[..., Any]:
    """Return what `jax.grad` returns, but for gradients that are reduced over all ranks in one call."""
    both = value_and_grad(fun, argnums, has_aux, op, compression, process_set, **more)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return reduced


def broadcast_parameters(params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Return the parameters, or another pytree of arrays such as an optimizer's state, of rank `root_rank`.

    Every rank must give a pytree of the same form. Blocks until they are here."""
    return broadcast(params, root_rank, "parameters", process_set)
