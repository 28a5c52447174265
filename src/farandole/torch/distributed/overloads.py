"""Torch's overloads of a process group's methods: a tensor in place of a list, a root and an operation as arguments."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from farandole.torch.distributed.work import Work

__all__ = ["overloaded"]

FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}  # of options, by the argument that sets each


def overloaded(
    options: type[Any], tensors: int, *arguments: str
) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Let a method of so many arguments of tensors, and `options`, take these `arguments` in place of options.

    A tensor may then stand where the method takes a list of one, and a list where it takes a list of one list. Without
    options their defaults apply. A `timeout` counts as in options: the group's own limits each operation."""

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        @wraps(method)
        def call(group: object, /, *given: Any, **named: Any) -> Work:
            found, rest = given[:tensors], given[tensors:]
            has_options = "opts" in named or (bool(rest) and hasattr(rest[0], "asyncOp"))  # also those of another kind
            if has_options or len(found) < tensors or len(rest) > len(arguments) or named.keys() - set(arguments):
                return method(group, *given, **named)
            asked = options()
            for argument, value in [*zip(arguments, rest, strict=False), *named.items()]:
                if value is not None:
                    setattr(asked, FIELDS[argument], value)
            if any(isinstance(each, torch.Tensor) for each in found):
                found = tuple([each] for each in found)
            return method(group, *found, asked)

        return call

    return decorate
