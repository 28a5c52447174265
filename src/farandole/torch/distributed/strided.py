"""Strided outputs, such as channels_last and transposed tensors, and lazily negated ones, by way of dense copies."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import torch

from farandole.torch.adapter import is_expanded
from farandole.torch.distributed.streams import note_use
from farandole.torch.distributed.tensors import StridedOutput, is_dense, resolved
from farandole.torch.distributed.work import Work

__all__ = ["writes_strided"]

Outputs: TypeAlias = "torch.Tensor | Sequence[Outputs]"
Group = TypeVar("Group")
Given = TypeVar("Given", bound=Outputs)
P = ParamSpec("P")


def writes_strided(
    method: Callable[Concatenate[Group, Given, P], Work],
) -> Callable[Concatenate[Group, Given, P], Work]:
    """Let a method that writes to its first argument, contiguous tensors, write to strided ones."""

    @wraps(method)
    def call(group: Group, outputs: Given, /, *args: P.args, **kwargs: P.kwargs) -> Work:
        try:
            return method(group, outputs, *args, **kwargs)
        except StridedOutput:  # raised before anything is under way; to look here first would slow down all others
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        work = method(group, cast(Given, _contiguous(outputs, copies)), *args, **kwargs)

        def finish() -> None:
            for output, copy in copies:
                if copy is not output:
                    output.detach().copy_(copy)
                    note_use(copy)

        return work.finished_by(finish, [output for output, _ in copies])

    return call


def _contiguous(outputs: Outputs, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Outputs:
    """Return outputs of the same form without strided ones; add each with its copy, or with itself, to `copies`."""
    if not isinstance(outputs, torch.Tensor):
        return [_contiguous(each, copies) for each in outputs]
    # The method refuses an expanded tensor if it writes to it.
    copy = outputs if is_dense(outputs) or is_expanded(outputs) else resolved(outputs)
    copies.append((outputs, copy))
    return copy
