"""Gradients through the operations.

A reduction is differentiated as if the loss were the sum of the ranks' losses. For allgather and broadcast the ranks'
gradients are averaged, and reducescatter with Sum multiplies by the number of ranks, as in Horovod. Backward passes
communicate, so every rank must run them; their names are the forward pass' name plus ".backward"."""

from collections.abc import Sequence
from typing import Any

import torch

from farandole.core import default
from farandole.core.operations import kinds
from farandole.core.operations.reduction import Adasum, Average, Product, Reduction, Sum
from farandole.core.operations.request import Request
from farandole.core.operations.requests import Requests
from farandole.core.process_sets.process_set import membership_of
from farandole.torch.extremes import extreme_share, others_product

__all__ = ["Differentiable"]

Tensor = torch.Tensor


class Differentiable(Requests[Tensor]):
    """Requests that autograd records when a tensor requires a gradient."""

    def run(self, request: Request, tensor: Tensor) -> Any:
        """Return the result of `request` in new memory."""
        if not _recorded(tensor):
            return Requests.run(self, request, tensor)
        return _apply(_FUNCTIONS[request.kind], self, request, tensor)

    def run_group(self, request: Request, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the results of a grouped `request` in new memory."""
        if not any(map(_recorded, tensors)):
            return super().run_group(request, tensors)
        return list(_apply(_GROUPED[request.kind], self, request, *tensors))


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Any:
    return function.apply(*arguments)


def _recorded(tensor: Tensor) -> bool:
    # Anything but a tensor is refused later, with all other invalid arguments.
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Differentiable, request: Request, tensor: Tensor) -> Tensor:
        ctx.requests, ctx.request = requests, request
        output: Tensor = Requests.run(requests, request, tensor)
        if request.reduction.op not in (Sum, Average):
            ctx.save_for_backward(tensor)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        request: Request = ctx.request
        if request.reduction.op in (Sum, Average):
            return None, None, ctx.requests.run(request.backward(), grads[0].contiguous())
        return None, None, _selective_gradient(ctx.requests, request, ctx.saved_tensors[0], grads[0], "")


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Differentiable, request: Request, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.requests, ctx.request = requests, request
        outputs = Requests.run_group(requests, request, tensors)
        if request.reduction.op not in (Sum, Average):
            ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        request: Request = ctx.request
        if request.reduction.op in (Sum, Average):
            return None, None, *ctx.requests.run_group(request.backward(), [grad.contiguous() for grad in grads])
        pairs = zip(ctx.saved_tensors, grads, strict=True)
        return (
            None,
            None,
            *(
                _selective_gradient(ctx.requests, request, tensor, grad, f".{place}")
                for place, (tensor, grad) in enumerate(pairs)
            ),
        )


def _reduced(requests: Differentiable, request: Request, part: str, tensor: Tensor, op: int) -> Tensor:
    """Reduce for the gradient of `request`, without scaling."""
    back = request.backward(part, kind=kinds.ALLREDUCE, reduction=Reduction(op), grouped=False)
    reduced: Tensor = requests.run(back, tensor.contiguous())
    return reduced


def _selective_gradient(requests: Differentiable, request: Request, tensor: Tensor, grad: Tensor, part: str) -> Tensor:
    op, prescale, postscale = request.reduction
    if op == Adasum:
        raise NotImplementedError("allreduce with op=Adasum has no gradient here; call it on detached tensors")

    def reduce(value: Tensor, op: int, label: str) -> Tensor:
        return _reduced(requests, request, part + label, value, op)

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
    def forward(ctx: Any, requests: Differentiable, request: Request, tensor: Tensor) -> Tensor:
        ctx.requests, ctx.request, ctx.rows = requests, request, [tensor.shape[0] if tensor.dim() else 0]
        joined: Tensor = Requests.run(requests, request, tensor)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_own_rows(ctx.requests, ctx.request, ctx.rows, grads)


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Differentiable, request: Request, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.requests, ctx.request = requests, request
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return tuple(Requests.run_group(requests, request, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_own_rows(ctx.requests, ctx.request, ctx.rows, grads)


def _own_rows(requests: Differentiable, request: Request, rows: list[int], grads: Sequence[Tensor]) -> list[Tensor]:
    back = request.backward(kind=kinds.ALLREDUCE, reduction=Reduction(Average), grouped=True)
    averaged = requests.run_group(back, [grad.contiguous() for grad in grads])
    # Each rank's rows begin where those of the previous ranks end.
    table = requests.run(request.backward(".rows", grouped=False), torch.tensor([rows]))
    starts = table[: membership_of(request.process_set, "backward").rank].sum(0).tolist()
    return [grad.narrow(0, start, count) for grad, start, count in zip(averaged, starts, rows, strict=True)]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Differentiable, request: Request, tensor: Tensor) -> Tensor:
        ctx.requests, ctx.request = requests, request
        spread: Tensor = Requests.run(requests, request, tensor)
        return spread

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        averaged = _reduced(ctx.requests, ctx.request, "", grads[0], Average)
        is_root = torch.tensor(default.rank() == ctx.request.root, device=averaged.device)
        # Zeros that depend on the average: every rank must run the second derivative too.
        return None, None, torch.where(is_root, averaged, 0)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Differentiable, request: Request, tensor: Tensor) -> tuple[Tensor, Tensor]:
        output, received = Requests.run(requests, request, tensor)
        ctx.requests, ctx.request, ctx.received, ctx.rows = requests, request, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back, _ = ctx.requests.run(ctx.request.backward(splits=ctx.received), grads[0].contiguous())
        # Rows beyond the splits were not sent.
        unsent = back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))
        return None, None, torch.cat([back, unsent]) if len(unsent) else back


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Differentiable, request: Request, tensor: Tensor) -> Tensor:
        ctx.requests, ctx.request = requests, request
        rows: Tensor = Requests.run(requests, request, tensor)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.request.backward(kind=kinds.ALLGATHER, reduction=Reduction(Sum))
        return None, None, _scaled(ctx.requests.run(back, grads[0].contiguous()), ctx.request)


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Differentiable, request: Request, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.requests, ctx.request = requests, request
        return tuple(Requests.run_group(requests, request, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.request.backward(kind=kinds.ALLGATHER, reduction=Reduction(Sum))
        joined = ctx.requests.run_group(back, [grad.contiguous() for grad in grads])
        return None, None, *(_scaled(grad, ctx.request) for grad in joined)


def _scaled(grad: Tensor, request: Request) -> Tensor:
    op, prescale, postscale = request.reduction
    factor = prescale * postscale * (membership_of(request.process_set, "backward").size if op == Sum else 1)
    return grad if factor == 1.0 else grad * factor


_FUNCTIONS = {
    kinds.ALLREDUCE: _Allreduce,
    kinds.ALLGATHER: _Allgather,
    kinds.BROADCAST: _Broadcast,
    kinds.ALLTOALL: _Alltoall,
    kinds.REDUCESCATTER: _Reducescatter,
}
_GROUPED = {
    kinds.ALLREDUCE: _GroupedAllreduce,
    kinds.ALLGATHER: _GroupedAllgather,
    kinds.REDUCESCATTER: _GroupedReducescatter,
}
