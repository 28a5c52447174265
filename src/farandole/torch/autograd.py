"""Gradients through the operations.

A reduction is differentiated as if the loss were the sum of the ranks' losses; for allgather and broadcast the ranks'
gradients are averaged, and reducescatter with Sum multiplies by the number of ranks: Horovod's users expect so.
Backward passes communicate, so every rank must run them; they ask under the forward pass' name plus ".backward".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from farandole.core import default
from farandole.core.blocking import Blocking
from farandole.core.process_sets import ProcessSet, seat_of
from farandole.core.reduction import Adasum, Average, Product, Sum
from farandole.core.seat import Seat
from farandole.torch.extremes import extreme_share, others_product

__all__ = ["Differentiable"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """What an operation was asked for, and what asks for its gradient."""

    way: "Differentiable"
    name: str | None
    members: ProcessSet
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0

    def backward(self, part: str = "") -> "Call":
        """Return the call with the name its gradient, or a part of it, is asked for under."""
        return replace(self, name=None if self.name is None else f"{self.name}.backward{part}")

    def seat(self) -> Seat:
        """Return this rank's place among those that take part."""
        return seat_of(self.members, "backward", self.name)

    def reduce(self, tensor: Tensor, op: int = Sum) -> Tensor:
        """Reduce without scaling."""
        return self.way.allreduce(tensor.contiguous(), self.name, op, 1.0, 1.0, self.members)


class Differentiable(Blocking[Tensor]):
    """The blocking operations, recorded by autograd when a tensor requires a gradient."""

    def allreduce(
        self, tensor: Tensor, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet
    ) -> Tensor:
        """Return the reduction."""
        if not _recorded(tensor):
            return super().allreduce(tensor, name, op, prescale, postscale, members)
        reduced: Tensor = _apply(_Allreduce, Call(self, name, members, op, prescale, postscale), tensor)
        return reduced

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        members: ProcessSet,
    ) -> list[Tensor]:
        """Return the reductions of a group."""
        if not any(map(_recorded, tensors)):
            return super().grouped_allreduce(tensors, name, op, prescale, postscale, members)
        return list(_apply(_GroupedAllreduce, Call(self, name, members, op, prescale, postscale), *tensors))

    def allgather(self, tensor: Tensor, name: str | None, members: ProcessSet) -> Tensor:
        """Return the ranks' rows joined."""
        if not _recorded(tensor):
            return super().allgather(tensor, name, members)
        joined: Tensor = _apply(_Allgather, Call(self, name, members), tensor)
        return joined

    def grouped_allgather(self, tensors: Sequence[Tensor], name: str | None, members: ProcessSet) -> list[Tensor]:
        """Return the ranks' rows joined, for each tensor of a group."""
        if not any(map(_recorded, tensors)):
            return super().grouped_allgather(tensors, name, members)
        return list(_apply(_GroupedAllgather, Call(self, name, members), *tensors))

    def broadcast(self, tensor: Tensor, root: int, name: str | None, members: ProcessSet) -> Tensor:
        """Return the root's tensor."""
        if not _recorded(tensor):
            return super().broadcast(tensor, root, name, members)
        spread: Tensor = _apply(_Broadcast, Call(self, name, members), root, tensor)
        return spread

    def alltoall(self, tensor: Tensor, splits: object, name: str | None, members: ProcessSet) -> tuple[Tensor, Tensor]:
        """Return the rows sent to this rank, and how many came from each."""
        if not _recorded(tensor):
            return super().alltoall(tensor, splits, name, members)
        output, received = _apply(_Alltoall, Call(self, name, members), splits, tensor)
        return output, received

    def reducescatter(
        self, tensor: Tensor, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet
    ) -> Tensor:
        """Return this rank's rows of the reduction."""
        if not _recorded(tensor):
            return super().reducescatter(tensor, name, op, prescale, postscale, members)
        rows: Tensor = _apply(_Reducescatter, Call(self, name, members, op, prescale, postscale), tensor)
        return rows

    def grouped_reducescatter(
        self,
        tensors: Sequence[Tensor],
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        members: ProcessSet,
    ) -> list[Tensor]:
        """Return this rank's rows of the reductions of a group."""
        if not any(map(_recorded, tensors)):
            return super().grouped_reducescatter(tensors, name, op, prescale, postscale, members)
        return list(_apply(_GroupedReducescatter, Call(self, name, members, op, prescale, postscale), *tensors))


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Any:
    return function.apply(*arguments)


def _recorded(tensor: Tensor) -> bool:
    # What is no tensor is refused later, where all wrong tensors are.
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, tensor: Tensor) -> Tensor:
        ctx.call = call
        output = Blocking.allreduce(call.way, tensor, call.name, call.op, call.prescale, call.postscale, call.members)
        if call.op not in (Sum, Average):
            ctx.save_for_backward(tensor)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        if call.op in (Sum, Average):
            back = call.backward()
            return None, call.way.allreduce(
                grads[0].contiguous(), back.name, call.op, call.prescale, call.postscale, call.members
            )
        return None, _selective_gradient(call, ctx.saved_tensors[0], grads[0], "")


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        outputs = Blocking.grouped_allreduce(
            call.way, tensors, call.name, call.op, call.prescale, call.postscale, call.members
        )
        if call.op not in (Sum, Average):
            ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        if call.op in (Sum, Average):
            whole = [grad.contiguous() for grad in grads]
            return None, *call.way.grouped_allreduce(
                whole, call.backward().name, call.op, call.prescale, call.postscale, call.members
            )
        pairs = zip(ctx.saved_tensors, grads, strict=True)
        return None, *(
            _selective_gradient(call, tensor, grad, f".{place}") for place, (tensor, grad) in enumerate(pairs)
        )


def _selective_gradient(call: Call, tensor: Tensor, grad: Tensor, part: str) -> Tensor:
    if call.op == Adasum:
        raise NotImplementedError("allreduce with op=Adasum has no gradient here; call it on detached tensors")

    def reduce(value: Tensor, op: int, what: str) -> Tensor:
        return call.backward(part + what).reduce(value, op)

    total = reduce(grad, Sum, ".total")
    if call.op == Product:
        factor = call.prescale ** call.seat().size * call.postscale
        return total * others_product(tensor, reduce) * factor
    return total * extreme_share(tensor, call.op, call.prescale, reduce) * (call.prescale * call.postscale)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, tensor: Tensor) -> Tensor:
        ctx.call, ctx.rows = call, [tensor.shape[0] if tensor.dim() else 0]
        return Blocking.allgather(call.way, tensor, call.name, call.members)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_own_rows(ctx.call, ctx.rows, grads)


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.rows = call, [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return tuple(Blocking.grouped_allgather(call.way, tensors, call.name, call.members))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_own_rows(ctx.call, ctx.rows, grads)


def _own_rows(call: Call, rows: list[int], grads: Sequence[Tensor]) -> list[Tensor]:
    back = call.backward()
    whole = [grad.contiguous() for grad in grads]
    averaged = call.way.grouped_allreduce(whole, back.name, Average, 1.0, 1.0, call.members)
    # Each rank's rows begin where those of the ranks before it end.
    table = call.way.allgather(torch.tensor([rows]), call.backward(".rows").name, call.members)
    starts = table[: call.seat().rank].sum(0).tolist()
    return [grad.narrow(0, start, count) for grad, start, count in zip(averaged, starts, rows, strict=True)]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, root: int, tensor: Tensor) -> Tensor:
        ctx.call, ctx.root = call, root
        return Blocking.broadcast(call.way, tensor, root, call.name, call.members)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        averaged = ctx.call.backward().reduce(grads[0], Average)
        # Zeros that depend on the average all the same: every rank has to run the second derivative too.
        return None, None, torch.where(torch.tensor(default.rank() == ctx.root), averaged, 0)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, splits: object, tensor: Tensor) -> tuple[Tensor, Tensor]:
        output, received = Blocking.alltoall(call.way, tensor, splits, call.name, call.members)
        ctx.call, ctx.received, ctx.rows = call, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        back, _ = call.way.alltoall(grads[0].contiguous(), ctx.received, call.backward().name, call.members)
        # Rows beyond the splits went nowhere.
        unsent = back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))
        return None, None, torch.cat([back, unsent]) if len(unsent) else back


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, tensor: Tensor) -> Tensor:
        ctx.call = call
        return Blocking.reducescatter(call.way, tensor, call.name, call.op, call.prescale, call.postscale, call.members)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        joined = call.way.allgather(grads[0].contiguous(), call.backward().name, call.members)
        return None, _scaled(joined, call)


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(
            Blocking.grouped_reducescatter(
                call.way, tensors, call.name, call.op, call.prescale, call.postscale, call.members
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        whole = [grad.contiguous() for grad in grads]
        joined = call.way.grouped_allgather(whole, call.backward().name, call.members)
        return None, *(_scaled(grad, call) for grad in joined)


def _scaled(grad: Tensor, call: Call) -> Tensor:
    factor = call.prescale * call.postscale * (call.seat().size if call.op == Sum else 1)
    return grad if factor == 1.0 else grad * factor
