"""Gradients through the operations.

A reduction is differentiated as if the loss were the sum of the ranks' losses. For allgather and broadcast the ranks'
gradients are averaged, and reducescatter with Sum multiplies by the number of ranks, as in Horovod. Backward passes
communicate, so every rank must run them; their names are the forward pass' name plus ".backward"."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from farandole.core import default
from farandole.core.operations import kinds
from farandole.core.operations.reduction import LINEAR, Adasum, Average, Product, Reduction, Sum
from farandole.core.operations.request import Request
from farandole.core.operations.requests import Requests
from farandole.core.process_sets.process_set import membership_of
from farandole.torch.extremes import extreme_share, others_product

Tensor = torch.Tensor


class _Call(FunctionCtx):
    """The object in which autograd keeps values of an operation until its backward pass."""

    requests: "Differentiable"
    request: Request
    rows: list[int]
    received: Sequence[int]
    saved_tensors: tuple[Tensor, ...]


class Differentiable(Requests[Tensor]):
    """Requests that autograd records when a tensor requires a gradient."""

    def run(self, request: Request, tensors: Tensor | Sequence[Tensor], write: bool = False) -> Any:
        """Return the result of `request`; blocks as `Requests.run` does."""
        # Anything but a tensor is refused later, with all other invalid arguments.
        if write or not torch.is_grad_enabled():
            recorded = False
        elif request.grouped:
            tensors = tensors if isinstance(tensors, (list, tuple)) else list(tensors)
            recorded = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)
        else:
            recorded = isinstance(tensors, Tensor) and tensors.requires_grad
        if not recorded:
            return Requests.run(self, request, tensors, write)
        results = _FUNCTIONS[request.kind].apply(self, request, *(tensors if request.grouped else (tensors,)))
        if request.grouped:
            return list(results)
        return results if request.kind == kinds.ALLTOALL else results[0]


def _forward(ctx: _Call, requests: Differentiable, request: Request, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a request, grouped or on one tensor, and keep it for the backward pass."""
    ctx.requests, ctx.request = requests, request
    if request.grouped:
        return tuple(Requests.run(requests, request, tensors))
    return (Requests.run(requests, request, tensors[0]),)


def _backward(ctx: _Call, back: Request, grads: Sequence[Tensor]) -> list[Tensor]:
    """Run a request of the backward pass, which autograd may record as well."""
    ready = [grad.contiguous() for grad in grads]
    reduced: list[Tensor] = ctx.requests.run(back, ready) if back.grouped else [ctx.requests.run(back, ready[0])]
    return reduced


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Call, requests: Differentiable, request: Request, *tensors: Tensor) -> tuple[Tensor, ...]:
        if request.reduction.op not in LINEAR:
            ctx.save_for_backward(*tensors)
        return _forward(ctx, requests, request, tensors)

    @staticmethod
    def backward(ctx: _Call, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.request.reduction.op in LINEAR:
            return None, None, *_backward(ctx, ctx.request.backward(), grads)
        parts = [f".{place}" for place in range(len(grads))] if ctx.request.grouped else [""]
        triples = zip(ctx.saved_tensors, grads, parts, strict=True)
        return None, None, *(_selective_gradient(ctx.requests, ctx.request, *each) for each in triples)


def _selective_gradient(requests: Differentiable, request: Request, tensor: Tensor, grad: Tensor, part: str) -> Tensor:
    op, prescale, postscale = request.reduction
    if op == Adasum:
        raise NotImplementedError("allreduce with op=Adasum has no gradient here; call it on detached tensors")

    def reduce(value: Tensor, op: int, label: str) -> Tensor:
        back = request.backward(part + label, kind=kinds.ALLREDUCE, reduction=Reduction(op), grouped=False)
        reduced: Tensor = requests.run(back, value.contiguous())
        return reduced

    total = reduce(grad, Sum, ".total")
    if op == Product:
        return (
            total
            * others_product(tensor, reduce)
            * (prescale ** membership_of(request.process_set, "backward").size * postscale)
        )
    return total * extreme_share(tensor, op, prescale, reduce) * (prescale * postscale)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Call, requests: Differentiable, request: Request, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return _forward(ctx, requests, request, tensors)

    @staticmethod
    def backward(ctx: _Call, *grads: Tensor) -> tuple[Tensor | None, ...]:
        request, rows = ctx.request, ctx.rows
        back = request.backward(kind=kinds.ALLREDUCE, reduction=Reduction(Average), grouped=True)
        averaged = _backward(ctx, back, grads)
        # Each rank's rows begin where those of the previous ranks end.
        table = ctx.requests.run(request.backward(".rows", grouped=False), torch.tensor([rows]))
        starts = table[: membership_of(request.process_set, "backward").rank].sum(0).tolist()
        own = (grad.narrow(0, start, count) for grad, start, count in zip(averaged, starts, rows, strict=True))
        return None, None, *own


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Call, requests: Differentiable, request: Request, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _forward(ctx, requests, request, tensors)

    @staticmethod
    def backward(ctx: _Call, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (averaged,) = _backward(ctx, ctx.request.backward(kind=kinds.ALLREDUCE, reduction=Reduction(Average)), grads)
        is_root = torch.tensor(default.rank() == ctx.request.root, device=averaged.device)
        # Zeros that depend on the average: every rank must run the second derivative too.
        return None, None, torch.where(is_root, averaged, 0)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Call, requests: Differentiable, request: Request, tensor: Tensor) -> tuple[Tensor, Tensor]:
        output, received = Requests.run(requests, request, tensor)
        ctx.requests, ctx.request, ctx.received, ctx.rows = requests, request, received, [tensor.shape[0]]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: _Call, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back, _ = ctx.requests.run(ctx.request.backward(splits=ctx.received), grads[0].contiguous())
        # Rows beyond the splits were not sent.
        unsent = back.new_zeros((ctx.rows[0] - back.shape[0], *back.shape[1:]))
        return None, None, torch.cat([back, unsent]) if len(unsent) else back


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Call, requests: Differentiable, request: Request, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _forward(ctx, requests, request, tensors)

    @staticmethod
    def backward(ctx: _Call, *grads: Tensor) -> tuple[Tensor | None, ...]:
        joined = _backward(ctx, ctx.request.backward(kind=kinds.ALLGATHER, reduction=Reduction(Sum)), grads)
        return None, None, *(_scaled(grad, ctx.request) for grad in joined)


def _scaled(grad: Tensor, request: Request) -> Tensor:
    op, prescale, postscale = request.reduction
    factor = prescale * postscale * (membership_of(request.process_set, "backward").size if op == Sum else 1)
    return grad if factor == 1.0 else grad * factor


_FUNCTIONS: dict[int, type[torch.autograd.Function]] = {
    kinds.ALLREDUCE: _Allreduce,
    kinds.ALLGATHER: _Allgather,
    kinds.BROADCAST: _Broadcast,
    kinds.ALLTOALL: _Alltoall,
    kinds.REDUCESCATTER: _Reducescatter,
}
