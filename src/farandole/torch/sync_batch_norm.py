"""Batch normalization over the batches of all ranks, as if they were one batch.

One allgather in the forward pass, one allreduce in the backward pass. Each rank sends the mean and the sum of squares
around it. They are combined in float64 (Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances", 1979), so no large mean is subtracted from a sum of squares."""

from copy import copy
from dataclasses import dataclass

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from farandole.core.operations.reduction import Sum
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, require_registered
from farandole.torch.ops import allgather, allreduce

Tensor = torch.Tensor


class SyncBatchNorm(_BatchNorm):
    """Batch normalization whose mean and variance, and whose gradients, are those of the ranks' batches joined.

    Takes inputs of two dimensions and more; batches may differ in length between ranks, and be empty on some. Every
    rank must run the forward pass and the backward pass. It computes in float32 for half floats. In eval mode, with one
    rank, and on ranks outside `process_set` it is an ordinary batch normalization. Cannot be differentiated twice."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input.

        Blocks in training until every rank has called it; raises `ValueError` for inputs of less than two dimensions,
        and on all ranks if the joined batch has one value per channel."""
        self._check_input_dim(input)
        if not self.training or self._alone():
            normalized: Tensor = super().forward(input)
            return normalized
        return self._normalize(input)

    # A compiler leaves the collectives to Python. `torch.compiler.disable` would import it with this module.
    @_disable_dynamo
    def _normalize(self, input: Tensor) -> Tensor:
        among = _Among(f"sync_batch_norm.{self.num_features}", self.process_set)
        moments = _join(_local_moments(input.detach()), among)
        if self.track_running_stats:
            self._track(moments)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, moments, self.eps, among
        )
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels (got input of shape {list(input.shape)})")

    def _alone(self) -> bool:
        require_registered(self.process_set, type(self).__name__)
        return not self.process_set.included() or self.process_set.size() == 1

    def _track(self, moments: "_Moments") -> None:
        """Move the running statistics towards those of this batch."""
        mean, var, seen = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None:
            return
        if seen is not None:
            seen.add_(1)
        # Without a momentum: the average of all batches.
        share = 1.0 / float(seen or 1) if self.momentum is None else self.momentum
        with torch.no_grad():
            unbiased = moments.squares / (moments.count - 1)
            mean.mul_(1 - share).add_(moments.mean.to(mean), alpha=share)
            var.mul_(1 - share).add_(unbiased.to(var), alpha=share)


def convert_sync_batchnorm(module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> torch.nn.Module:
    """Replace each batch normalization in `module` by a `SyncBatchNorm`, and return it; itself if it is one.

    Parameters, buffers and hooks stay the same objects, so optimizers made before remain valid. Raises `ValueError` for
    a lazy batch normalization that has not seen an input.
    """
    return _converted(module, process_set, {})


def _converted(
    module: torch.nn.Module, process_set: ProcessSet, known: dict[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module:
    if module in known:
        return known[module]  # a module in two places is converted once
    known[module] = module
    if isinstance(module, _BatchNorm):
        if isinstance(module, LazyModuleMixin):
            raise ValueError(f"{type(module).__name__} does not know its channels yet; run the model once before")
        made = SyncBatchNorm.__new__(SyncBatchNorm)
        made.__dict__.update(
            {name: copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        )
        made.process_set = process_set
        known[module] = made
    for name, child in list(module._modules.items()):
        if child is not None:
            setattr(known[module], name, _converted(child, process_set, known))
    return known[module]


@dataclass(frozen=True)
class _Among:
    """Name and process set of a request."""

    name: str
    process_set: ProcessSet


@dataclass(frozen=True)
class _Moments:
    """Per channel: the number of values, their mean, the sum of squares around it. In float64, on the CPU."""

    count: float
    mean: Tensor
    squares: Tensor


def _local_moments(values: Tensor) -> _Moments:
    if values.numel() == 0:
        zeros = torch.zeros(values.size(1), dtype=torch.float64)
        return _Moments(0.0, zeros, zeros)
    count = values.numel() // values.size(1)
    # The function of torch's own batch normalization; sums over all dimensions but one take several times as long.
    mean, var = torch.batch_norm_update_stats(_widened(values), None, None, 0.0)
    return _Moments(count, mean.cpu().double(), var.cpu().double() * count)


def _join(mine: _Moments, among: _Among) -> _Moments:
    """Return the moments of all ranks' values together, with the same bits on all ranks."""
    row = torch.cat([torch.tensor([float(mine.count)], dtype=torch.float64), mine.mean, mine.squares])
    table = allgather(row[None], among.name, among.process_set)
    counts, rest = table[:, :1], table[:, 1:]
    means, squares = rest.chunk(2, 1)
    count = float(counts.sum())
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {count:.0f} on all ranks together")
    mean = (counts * means).sum(0) / count
    return _Moments(count, mean, (squares + counts * (means - mean) ** 2).sum(0))


class _Call(FunctionCtx):
    """The object in which autograd keeps values of a normalization until its backward pass."""

    count: float
    eps: float
    among: _Among
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Call,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: _Moments,
        eps: float,
        among: _Among,
    ) -> Tensor:
        wide = _wide(values.dtype)
        mean, var = (each.to(values.device, wide) for each in (moments.mean, moments.squares / moments.count))
        ctx.save_for_backward(values, weight, mean, var)  # type: ignore[arg-type]  # torch keeps a None, too
        ctx.count, ctx.eps, ctx.among = moments.count, eps, among
        if values.numel() == 0:
            return torch.empty_like(values)
        scale, shift = (None if each is None else each.to(wide) for each in (weight, bias))
        return batch_norm(values, mean, var, scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Call, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, var = ctx.saved_tensors
        wide, above = _widened(values), _widened(grads[0])
        scale = torch.ones_like(mean) if weight is None else weight.to(mean)
        # As if mean and variance were constants. The weight's and the bias' gradients are those of this rank's part,
        # like those of other parameters.
        for_values, for_weight, for_bias = above, torch.zeros_like(mean), torch.zeros_like(mean)
        if values.numel():  # torch divides by zero for an empty batch
            for_values, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
                above, wide, scale, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        if ctx.needs_input_grad[0]:
            # The part through mean and variance, which depend on every rank's values.
            sums = torch.stack([for_weight, for_bias]).cpu().double()
            total = allreduce(sums, name=ctx.among.name, op=Sum, process_set=ctx.among.process_set).to(mean) / ctx.count
            slope, shift = -total * scale * (var + ctx.eps).rsqrt()
            if values.numel():
                for_values += batch_norm(wide, mean, var, slope, shift, training=False, eps=ctx.eps)
        found = zip((for_values, for_weight, for_bias), (values, weight, weight), ctx.needs_input_grad[:3], strict=True)
        return *(each.to(like.dtype) if needed else None for each, like, needed in found), None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the computation."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _widened(values: Tensor) -> Tensor:
    return values.to(_wide(values.dtype))
