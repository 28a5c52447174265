"""Adapter for torch tensors."""

from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad, graph
from torch.utils.dlpack import from_dlpack

from farandole.core.operations.adapter import DeviceResult
from farandole.errors import InvalidRequest

__all__ = ["DTYPES", "TorchAdapter", "increment_versions", "is_expanded"]

DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)

# Marks tensors as changed for autograd, so that a stale gradient is an error, not a number. torch's public function
# takes a third longer, because it also takes a single tensor.
increment_versions: Callable[[Sequence[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", graph.increment_version
)
_is_neg = torch.Tensor.is_neg


class TorchAdapter:
    """Adapter for tensors on the CPU or on CUDA, with the dtypes that the engine reduces."""

    name = "torch"
    own_type = None

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Refuse anything but a tensor, negated views, which are contiguous although their memory has the wrong signs,
        and tensors of forward-mode differentiation, whose tangents would be lost."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"'{name}': expected a torch tensor, got {type(tensor).__name__}")
        if tensor.is_neg():
            raise InvalidRequest(name, "the tensor is a lazily negated view; pass tensor.resolve_neg()")
        # Within `dual_level()`, where tensors may have tangents. The level is read in place: a call costs more.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise InvalidRequest(
                name, "operations have no forward-mode derivative; use backward(), or pass unpack_dual(tensor).primal"
            )

    def overwrite(self, tensor: torch.Tensor, name: str) -> None:
        """Check, and mark the tensor as changed."""
        try:
            wrong = _is_neg(tensor) or forward_ad._current_level >= 0
        except TypeError:  # no tensor
            wrong = True
        if wrong:
            self.check(tensor, name)
        increment_versions((tensor,))

    def check_each(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Check all, without a Python call per tensor."""
        try:
            wrong = any(map(_is_neg, tensors)) or forward_ad._current_level >= 0
        except TypeError:
            wrong = True
        if wrong:
            for tensor in tensors:
                self.check(tensor, name)

    def overwrite_each(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Do as `overwrite` for each."""
        self.check_each(tensors, name)
        increment_versions(tensors)

    def refusal(self, tensor: torch.Tensor) -> str | None:
        """Return the reason if layout, device or dtype, in this order, are not supported, else None."""
        if tensor.is_nested:
            return "a nested tensor cannot be sent; pass its values and offsets one by one, or to_padded_tensor(0.0)"
        if tensor.layout is not torch.strided:
            return f"a sparse tensor ({tensor.layout}) cannot be sent; use sparse_allreduce_async or to_dense()"
        if not (tensor.is_cpu or tensor.is_cuda):
            return f"the tensor is on {tensor.device}; tensors on the CPU and on CUDA can be sent, move it with .cpu()"
        if tensor.dtype not in DTYPES:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
            return f"Tensor type {tensor.type()} is not supported; use one of {known}"
        return None

    def dense(self, tensor: torch.Tensor, name: str, write: bool) -> torch.Tensor:
        """Return the tensor if it is contiguous, else a copy without a gradient; refuse to write to an expanded one."""
        if tensor.is_contiguous():
            return tensor
        if write and is_expanded(tensor):
            raise InvalidRequest(name, "several elements of the tensor share memory (expand); pass tensor.clone()")
        return tensor.detach().contiguous()

    def restore(self, values: torch.Tensor, tensor: torch.Tensor, write: bool) -> torch.Tensor:
        """Copy the values to `tensor`, or return them in its memory format, such as channels_last."""
        if values is tensor or (tensor.is_contiguous() and not write):
            return values
        target = tensor.detach() if write else torch.empty_like(tensor)
        target.copy_(values)
        return tensor if write else target

    empty_like = staticmethod(torch.empty_like)  # an uninitialized tensor without a gradient

    def adopt(self, result: object, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the engine's memory, or a copy on the device of `like`."""
        if not isinstance(result, DeviceResult):
            return from_dlpack(result)
        made = like.new_empty(result.shape)
        result.copy_to(made)
        return made

    def read_splits(self, splits: object, name: str) -> list[int]:
        """Read a list of integers, or an int32 tensor of one dimension."""
        if isinstance(splits, torch.Tensor):
            if splits.dtype != torch.int32 or splits.dim() != 1:
                raise InvalidRequest(name, f"splits must be an int32 tensor of one dimension, got {_spelled(splits)}")
            return [int(part) for part in splits.tolist()]
        if not isinstance(splits, Sequence) or not all(isinstance(part, int) for part in splits):
            raise InvalidRequest(name, f"splits must be a list of integers or an int32 tensor, got {splits!r}")
        return list(splits)

    def make_splits(self, splits: Sequence[int], given: object) -> torch.Tensor:
        """Return an int32 tensor, on the device of `given` if that is a tensor, as Horovod does, else on the CPU."""
        made = torch.tensor(splits, dtype=torch.int32)
        if not isinstance(given, torch.Tensor) or given.is_cpu:
            return made
        return torch.empty_like(given).copy_(made)

    def dtype(self, tensor: torch.Tensor) -> object:
        """Return the tensor's dtype."""
        return tensor.dtype

    def is_floating(self, tensor: torch.Tensor) -> bool:
        """Return whether the dtype is a floating-point one."""
        return tensor.is_floating_point()

    def cast(self, tensor: torch.Tensor, dtype: object) -> torch.Tensor:
        """Return the tensor in `dtype`; differentiable."""
        assert isinstance(dtype, torch.dtype)
        return tensor.to(dtype)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements share memory, as in the result of `expand`."""
    return any(not stride and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))


def _spelled(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
