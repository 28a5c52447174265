"""The operations as functions that JAX can trace and differentiate.

A reduction is differentiated as if the loss were the sum of the ranks' losses; for allgather and broadcast the ranks'
gradients are averaged, and reducescatter with Sum multiplies by the number of ranks: Horovod's users expect so.
Backward passes communicate, so every rank must run them; they ask under the forward pass' name plus ".backward".
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from farandole.core import kinds
from farandole.core.blocking import Blocking
from farandole.core.plugins import address_of
from farandole.core.process_sets import ProcessSet, seat_of
from farandole.core.reduction import Adasum, Average, Max, Min, Product, Sum
from farandole.core.requests import Requests
from farandole.jax import traced
from farandole.jax.adapter import Array, JaxAdapter, is_traced
from farandole.jax.calls import Call

__all__ = ["Differentiable", "eager", "operate"]

Arrays = tuple[Array, ...]

eager: Blocking[Array] = Blocking(Requests(JaxAdapter()))


class Differentiable(Blocking[Array]):
    """The blocking operations; what is traced becomes part of the program, and waits when that runs."""

    def allreduce(
        self, tensor: Array, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet
    ) -> Array:
        """Return the reduction."""
        if not is_traced(tensor):
            return super().allreduce(tensor, name, op, prescale, postscale, members)
        call = _call(kinds.ALLREDUCE, "allreduce", name, members, [tensor])
        (reduced,) = operate(call.scaled(op, prescale, postscale), (tensor,))
        return reduced

    def grouped_allreduce(
        self, tensors: Sequence[Array], name: str | None, op: int, prescale: float, postscale: float,
        members: ProcessSet,
    ) -> list[Array]:  # fmt: skip
        """Return the reductions of a group."""
        if not any(map(is_traced, tensors)):
            return super().grouped_allreduce(tensors, name, op, prescale, postscale, members)
        call = _call(kinds.ALLREDUCE, "grouped_allreduce", name, members, tensors, grouped=True)
        return list(operate(call.scaled(op, prescale, postscale), tuple(tensors)))

    def allgather(self, tensor: Array, name: str | None, members: ProcessSet) -> Array:
        """Return the ranks' rows joined."""
        if not is_traced(tensor):
            return super().allgather(tensor, name, members)
        (joined,) = operate(_call(kinds.ALLGATHER, "allgather", name, members, [tensor]), (tensor,))
        return joined

    def grouped_allgather(self, tensors: Sequence[Array], name: str | None, members: ProcessSet) -> list[Array]:
        """Return the ranks' rows joined, for each array of a group."""
        if not any(map(is_traced, tensors)):
            return super().grouped_allgather(tensors, name, members)
        call = _call(kinds.ALLGATHER, "grouped_allgather", name, members, tensors, grouped=True)
        return list(operate(call, tuple(tensors)))

    def broadcast(self, tensor: Array, root: int, name: str | None, members: ProcessSet) -> Array:
        """Return the root's array."""
        if not is_traced(tensor):
            return super().broadcast(tensor, root, name, members)
        (spread,) = operate(_call(kinds.BROADCAST, "broadcast", name, members, [tensor], root=root), (tensor,))
        return spread

    def alltoall(self, tensor: Array, splits: object, name: str | None, members: ProcessSet) -> tuple[Array, Array]:
        """Return the rows sent to this rank, and how many came from each."""
        if not is_traced(tensor):
            return super().alltoall(tensor, splits, name, members)
        parts = None if splits is None else tuple(self.requests.adapter.read_splits(splits, "alltoall"))
        output, received = operate(_call(kinds.ALLTOALL, "alltoall", name, members, [tensor], splits=parts), (tensor,))
        return output, received

    def reducescatter(
        self, tensor: Array, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet
    ) -> Array:
        """Return this rank's rows of the reduction."""
        if not is_traced(tensor):
            return super().reducescatter(tensor, name, op, prescale, postscale, members)
        call = _call(kinds.REDUCESCATTER, "reducescatter", name, members, [tensor])
        (rows,) = operate(call.scaled(op, prescale, postscale), (tensor,))
        return rows

    def grouped_reducescatter(
        self, tensors: Sequence[Array], name: str | None, op: int, prescale: float, postscale: float,
        members: ProcessSet,
    ) -> list[Array]:  # fmt: skip
        """Return this rank's rows of the reductions of a group."""
        if not any(map(is_traced, tensors)):
            return super().grouped_reducescatter(tensors, name, op, prescale, postscale, members)
        call = _call(kinds.REDUCESCATTER, "grouped_reducescatter", name, members, tensors, grouped=True)
        return list(operate(call.scaled(op, prescale, postscale), tuple(tensors)))


def _call(kind: int, word: str, name: str | None, members: ProcessSet, tensors: Sequence[Array], **more: Any) -> Call:
    shapes = tuple(tuple(jnp.shape(tensor)) for tensor in tensors)
    wire = word if name is None else f"{word}.{name}"
    return Call(kind, word, traced.traced_name(name), members, address_of(members, wire), shapes, **more)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def operate(call: Call, tensors: Arrays) -> Arrays:
    """Do it, or put it into the program that is being traced."""
    if any(map(is_traced, tensors)):
        return traced.run(call, tensors)
    return _run_now(call, tensors)


def _run_now(call: Call, tensors: Arrays) -> Arrays:
    """Do it now, with values: what jax.grad calls outside of a program."""
    reduction = (call.name, call.op, call.prescale, call.postscale, call.members)
    match call.kind, call.grouped:
        case kinds.ALLREDUCE, False:
            return (eager.allreduce(tensors[0], *reduction),)
        case kinds.ALLREDUCE, True:
            return tuple(eager.grouped_allreduce(tensors, *reduction))
        case kinds.ALLGATHER, False:
            return (eager.allgather(tensors[0], call.name, call.members),)
        case kinds.ALLGATHER, True:
            return tuple(eager.grouped_allgather(tensors, call.name, call.members))
        case kinds.BROADCAST, _:
            return (eager.broadcast(tensors[0], call.root, call.name, call.members),)
        case kinds.REDUCESCATTER, False:
            return (eager.reducescatter(tensors[0], *reduction),)
        case kinds.REDUCESCATTER, True:
            return tuple(eager.grouped_reducescatter(tensors, *reduction))
    return eager.alltoall(tensors[0], call.splits, call.name, call.members)


def _forward(call: Call, tensors: Arrays) -> tuple[Arrays, tuple[Arrays, Array | None]]:
    results = operate(call, tensors)
    kept = tensors if call.op in (Min, Max, Product) else ()
    return results, (kept, results[1] if call.kind == kinds.ALLTOALL else None)


def _backward(call: Call, kept: tuple[Arrays, Array | None], grads: Arrays) -> tuple[Arrays]:
    inputs, received = kept
    if call.kind == kinds.ALLTOALL:
        return ((_back_from_alltoall(call, grads[0], received),),)
    # Integers have no gradients; all ranks leave out the same.
    places = [place for place, grad in enumerate(grads) if grad.dtype != jax.dtypes.float0]
    chosen = tuple(grads[place] for place in places)
    shapes = tuple(call.shapes[place] for place in places)
    found: Arrays = ()
    if chosen and call.kind == kinds.ALLREDUCE:
        found = _of_allreduce(call, chosen, tuple(inputs[place] for place in places) if inputs else ())
    elif chosen and call.kind == kinds.ALLGATHER:
        found = _of_allgather(call, shapes, chosen)
    elif chosen and call.kind == kinds.BROADCAST:
        (average,) = operate(_reduction(call, Average), chosen)
        # Zeros that depend on the average all the same: every rank has to run the second derivative too.
        is_root = seat_of(call.members, "backward").place_of(call.root, "backward") == _rank(call)
        found = (jnp.where(is_root, average, jnp.zeros_like(average)),)
    elif chosen:
        rows = tuple(shape[0] for shape in shapes)
        word = "grouped_allgather" if call.grouped else "allgather"
        joined = operate(call.backward(kind=kinds.ALLGATHER, word=word, shapes=shapes, rows=rows), chosen)
        factor = call.prescale * call.postscale * (_size(call) if call.op == Sum else 1)
        found = joined if factor == 1.0 else tuple(grad * factor for grad in joined)
    all_of_them: list[Any] = [np.zeros(shape, jax.dtypes.float0) for shape in call.shapes]
    for place, grad in zip(places, found, strict=True):
        all_of_them[place] = grad
    return (tuple(all_of_them),)


operate.defvjp(_forward, _backward)


def _rank(call: Call) -> int:
    return seat_of(call.members, "backward").rank


def _size(call: Call) -> int:
    return seat_of(call.members, "backward").size


def _reduction(call: Call, op: int, part: str = "", prescale: float = 1.0, postscale: float = 1.0) -> Call:
    word = "grouped_allreduce" if call.grouped else "allreduce"
    return call.backward(part, kind=kinds.ALLREDUCE, word=word, op=op, prescale=prescale, postscale=postscale)


def _of_allreduce(call: Call, grads: Arrays, inputs: Arrays) -> Arrays:
    if call.op in (Sum, Average):
        return operate(_reduction(call, call.op, "", call.prescale, call.postscale), grads)
    if call.op == Adasum:
        raise NotImplementedError("allreduce with op=Adasum has no gradient here; use jax.lax.stop_gradient")
    totals = operate(_reduction(call, Sum, ".total"), grads)
    if call.op == Product:
        factor = call.prescale ** _size(call) * call.postscale
        others = _others_product(call, inputs)
        return tuple(total * other * factor for total, other in zip(totals, others, strict=True))
    shares = _extreme_share(call, inputs)
    factor = call.prescale * call.postscale
    return tuple(total * share * factor for total, share in zip(totals, shares, strict=True))


def _extreme_share(call: Call, tensors: Arrays) -> Arrays:
    """Return the parts of the gradients of Min or Max that belong to this rank.

    It is 1 where this rank alone holds the extreme, 0 where another does; ranks that hold it together share it."""
    # With a negative factor before it, the largest scaled value is the smallest one, and the reverse.
    chosen = call.op if call.prescale >= 0 else {Min: Max, Max: Min}[call.op]
    extremes = operate(_reduction(call, chosen, ".extreme"), tensors)
    held = tuple(
        ((mine == extreme) | (jnp.isnan(mine) & jnp.isnan(extreme))).astype(mine.dtype)
        for mine, extreme in zip(tensors, extremes, strict=True)
    )
    holders = operate(_reduction(call, Sum, ".held"), held)
    return tuple(mine / everybody for mine, everybody in zip(held, holders, strict=True))


def _others_product(call: Call, tensors: Arrays) -> Arrays:
    """Return the products of the other ranks' arrays, also where there are zeros."""
    zero = tuple((tensor == 0).astype(tensor.dtype) for tensor in tensors)
    filled = tuple(jnp.where(tensor == 0, jnp.ones_like(tensor), tensor) for tensor in tensors)
    products = operate(_reduction(call, Product, ".product"), filled)
    zeros = operate(_reduction(call, Sum, ".zeros"), zero)
    # Without a zero anywhere: divide by our own. With one: it is ours, or it is a factor of the others' product.
    return tuple(
        jnp.where(count == 0, product / own, jnp.where((mine == 1) & (count == 1), product, jnp.zeros_like(product)))
        for mine, own, product, count in zip(zero, filled, products, zeros, strict=True)
    )


def _of_allgather(call: Call, shapes: tuple[tuple[int, ...], ...], grads: Arrays) -> Arrays:
    averages = operate(_reduction(call, Average), grads)
    rows = [shape[0] for shape in shapes]
    if any(map(is_traced, grads)):
        starts = [_rank(call) * count for count in rows]
    else:
        # Each rank's rows begin where those of the ranks before it end.
        table = eager.allgather(jnp.array([rows], jnp.int32), call.backward(".rows").name, call.members)
        starts = [int(start) for start in np.asarray(table)[: _rank(call)].sum(0)]
    return tuple(average[start : start + count] for average, start, count in zip(averages, starts, rows, strict=True))


def _back_from_alltoall(call: Call, grad: Array, received: Array | None) -> Any:
    if grad.dtype == jax.dtypes.float0:
        return np.zeros(call.shapes[0], jax.dtypes.float0)
    parts = None if is_traced(received) else tuple(int(part) for part in np.asarray(received))
    if is_traced(grad):
        parts = None
    back, _ = operate(call.backward(splits=parts, shapes=(grad.shape,)), (grad,))
    # Rows beyond the splits went nowhere.
    unsent = call.shapes[0][0] - back.shape[0]
    return jnp.pad(back, [(0, unsent), *((0, 0) for _ in back.shape[1:])]) if unsent else back
