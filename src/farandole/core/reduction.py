"""The reductions, as the integers that users of Horovod know, and the rules for choosing one."""

import warnings
from typing import Final

__all__ = ["OP_NAMES", "Adasum", "Average", "Max", "Min", "Product", "Sum", "choose_op"]

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

OP_NAMES: Final = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def choose_op(op: int | None, average: bool | None) -> int:
    """Return the reduction that `op` or the deprecated `average` asks for; neither means Average.

    Raises `ValueError` when both are given or when `op` is not a reduction that exists here.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    return Average if op is None else known_op(op)


def known_op(op: int) -> int:
    """Return `op`; raises `ValueError` listing the reductions when there is no such one."""
    if op == Adasum:
        raise ValueError("op=Adasum is not available; use Average, Sum, Min, Max or Product")
    if not isinstance(op, int) or not 0 <= op < len(OP_NAMES):
        raise ValueError(f"op must be one of Average, Sum, Min, Max, Product, got {op!r}")
    return op
