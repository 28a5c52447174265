"""Operations as functions that JAX can trace and differentiate.

The gradient of a reduction is that of the sum of the ranks' losses. Allgather and broadcast average the ranks'
gradients, and reducescatter with Sum multiplies by the number of ranks, as in Horovod. Backward passes communicate, so
every rank must run them. Their requests have the forward pass' name plus ".backward".
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from farandole.core.operations import kinds
from farandole.core.operations.reduction import LINEAR, Adasum, Average, Max, Min, Product, Reduction, Sum
from farandole.core.operations.request import Request
from farandole.core.operations.requests import Requests
from farandole.core.plugins import address_of
from farandole.core.process_sets.process_set import membership_of
from farandole.jax import traced
from farandole.jax.adapter import Array, JaxAdapter, is_traced
from farandole.jax.traced_request import TracedRequest

Arrays = tuple[Array, ...]

eager: Requests[Array] = Requests(JaxAdapter())


class Differentiable(Requests[Array]):
    """Requests that become part of the program that is being traced, if any; they then block when the program runs."""

    def run(self, request: Request, tensors: Array | Sequence[Array], write: bool = False) -> Any:
        """Return the result of `request`; see `Requests.run`."""
        each: Sequence[Array] = tensors if request.grouped else (tensors,)  # type: ignore[assignment]  # a group is one
        if write or not traced.joins_program(*each):
            return super().run(request, tensors, write)
        if request.splits is not None:
            request = request._replace(splits=tuple(self.adapter.read_splits(request.splits, "alltoall")))
        results = operate(_traced(request, each), tuple(each))
        if request.grouped:
            return list(results)
        return results if request.kind == kinds.ALLTOALL else results[0]


def _traced(request: Request, tensors: Sequence[Array]) -> TracedRequest:
    shapes = tuple(tuple(jnp.shape(tensor)) for tensor in tensors)
    wire = request.stem if request.name is None else f"{request.stem}.{request.name}"
    return TracedRequest(request, address_of(request.process_set, wire), shapes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def operate(call: TracedRequest, tensors: Arrays) -> Arrays:
    """Perform the request, or add it to the program that is being traced."""
    if traced.joins_program(*tensors):
        return traced.run(call, tensors)
    # The arrays have values, because jax.grad calls this outside of a program. It leaves NumPy's arrays as they are.
    held = [jnp.asarray(tensor) for tensor in tensors]
    if call.request.grouped:
        return tuple(eager.run(call.request, held))
    result = eager.run(call.request, held[0])
    return result if call.request.kind == kinds.ALLTOALL else (result,)


def _forward(call: TracedRequest, tensors: Arrays) -> tuple[Arrays, tuple[Arrays, Array | None]]:
    results = operate(call, tensors)
    kept = tensors if call.request.reduction.op in (Min, Max, Product) else ()
    return results, (kept, results[1] if call.request.kind == kinds.ALLTOALL else None)


def _backward(call: TracedRequest, kept: tuple[Arrays, Array | None], grads: Arrays) -> tuple[Arrays]:
    inputs, received = kept
    if call.request.kind == kinds.ALLTOALL:
        return ((_back_from_alltoall(call, grads[0], received),),)
    # Integers have no gradients; all ranks leave out the same arrays.
    places = [place for place, grad in enumerate(grads) if grad.dtype != jax.dtypes.float0]
    chosen = tuple(grads[place] for place in places)
    shapes = tuple(call.shapes[place] for place in places)
    found: Arrays = ()
    if chosen and call.request.kind == kinds.ALLREDUCE:
        found = _of_allreduce(call, chosen, tuple(inputs[place] for place in places) if inputs else ())
    elif chosen and call.request.kind == kinds.ALLGATHER:
        found = _of_allgather(call, shapes, chosen)
    elif chosen and call.request.kind == kinds.BROADCAST:
        (average,) = operate(_reduction(call, Reduction(Average)), chosen)
        # The zeros depend on the average, so that every rank also runs the second derivative.
        membership = membership_of(call.request.process_set, "backward")
        is_root = membership.place_of(call.request.root, "backward") == membership.rank
        found = (jnp.where(is_root, average, jnp.zeros_like(average)),)
    elif chosen:
        rows = tuple(shape[0] for shape in shapes)
        parts = tuple(tuple(grad.shape) for grad in chosen)
        joined = operate(call.backward(kind=kinds.ALLGATHER, shapes=parts, rows=rows), chosen)
        op, prescale, postscale = call.request.reduction
        factor = prescale * postscale * (membership_of(call.request.process_set, "backward").size if op == Sum else 1)
        found = joined if factor == 1.0 else tuple(grad * factor for grad in joined)
    gradients: list[Any] = [np.zeros(shape, jax.dtypes.float0) for shape in call.shapes]
    for place, grad in zip(places, found, strict=True):
        gradients[place] = grad
    return (tuple(gradients),)


operate.defvjp(_forward, _backward)


def _reduction(call: TracedRequest, reduction: Reduction, part: str = "") -> TracedRequest:
    return call.backward(part, kind=kinds.ALLREDUCE, reduction=reduction)


def _of_allreduce(call: TracedRequest, grads: Arrays, inputs: Arrays) -> Arrays:
    op, prescale, postscale = call.request.reduction
    if op in LINEAR:
        return operate(_reduction(call, call.request.reduction), grads)
    if op == Adasum:
        raise NotImplementedError("allreduce with op=Adasum has no gradient here; use jax.lax.stop_gradient")
    totals = operate(_reduction(call, Reduction(Sum), ".total"), grads)
    if op == Product:
        factor = prescale ** membership_of(call.request.process_set, "backward").size * postscale
        others = _others_product(call, inputs)
        return tuple(total * other * factor for total, other in zip(totals, others, strict=True))
    shares = _extreme_share(call, inputs)
    factor = prescale * postscale
    return tuple(total * share * factor for total, share in zip(totals, shares, strict=True))


def _extreme_share(call: TracedRequest, tensors: Arrays) -> Arrays:
    """Return this rank's share of the gradients of Min or Max, between 0 and 1 for each element.

    The ranks that hold the extreme value divide the gradient equally."""
    # A negative prescale factor exchanges the largest and the smallest value.
    op, prescale, _ = call.request.reduction
    chosen = op if prescale >= 0 else {Min: Max, Max: Min}[op]
    extremes = operate(_reduction(call, Reduction(chosen), ".extreme"), tensors)
    held = tuple(
        ((mine == extreme) | (jnp.isnan(mine) & jnp.isnan(extreme))).astype(mine.dtype)
        for mine, extreme in zip(tensors, extremes, strict=True)
    )
    holders = operate(_reduction(call, Reduction(Sum), ".held"), held)
    return tuple(mine / count for mine, count in zip(held, holders, strict=True))


def _others_product(call: TracedRequest, tensors: Arrays) -> Arrays:
    """Return the products of the other ranks' arrays; zeros are handled."""
    zero = tuple((tensor == 0).astype(tensor.dtype) for tensor in tensors)
    filled = tuple(jnp.where(tensor == 0, jnp.ones_like(tensor), tensor) for tensor in tensors)
    products = operate(_reduction(call, Reduction(Product), ".product"), filled)
    zeros = operate(_reduction(call, Reduction(Sum), ".zeros"), zero)
    # Without zeros, divide the product by this rank's value. A single zero is this rank's, or makes the result zero.
    return tuple(
        jnp.where(count == 0, product / own, jnp.where((mine == 1) & (count == 1), product, jnp.zeros_like(product)))
        for mine, own, product, count in zip(zero, filled, products, zeros, strict=True)
    )


def _of_allgather(call: TracedRequest, shapes: tuple[tuple[int, ...], ...], grads: Arrays) -> Arrays:
    averages = operate(_reduction(call, Reduction(Average)), grads)
    rows = [shape[0] for shape in shapes]
    membership = membership_of(call.request.process_set, "backward")
    if traced.joins_program():
        # Inside programs the rows are spread as by a reducescatter: the first ranks have one more if there is a rest.
        spread = [divmod(grad.shape[0], membership.size) for grad in grads]
        starts = [membership.rank * each + min(membership.rank, rest) for each, rest in spread]
    else:
        # Each rank's rows begin where those of the previous ranks end.
        table = eager.run(call.request.backward(".rows", grouped=False), jnp.array([rows], jnp.int32))
        starts = [int(start) for start in np.asarray(table)[: membership.rank].sum(0)]
    return tuple(average[start : start + count] for average, start, count in zip(averages, starts, rows, strict=True))


def _back_from_alltoall(call: TracedRequest, grad: Array, received: Array | None) -> Any:
    if grad.dtype == jax.dtypes.float0:
        return np.zeros(call.shapes[0], jax.dtypes.float0)
    parts = None if traced.joins_program(received) else tuple(int(part) for part in np.asarray(received))
    if is_traced(grad) and call.request.splits is None:
        parts = None  # the ranks' parts are equal, and a batch of gradients takes no splits
    back, _ = operate(call.backward(splits=parts, shapes=(grad.shape,)), (grad,))
    # Rows beyond the splits were not sent.
    unsent = call.shapes[0][0] - back.shape[0]
    return jnp.pad(back, [(0, unsent), *((0, 0) for _ in back.shape[1:])]) if unsent else back
