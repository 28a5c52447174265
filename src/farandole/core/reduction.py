"""The reductions, as the integers that users of Horovod know, and the rules for choosing one.

Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020) adds what is orthogonal in the
ranks' tensors and averages what is parallel; for floating-point tensors and any number of ranks.
"""

import warnings
from typing import Final

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum", "choose_op"]

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

_AVAILABLE: Final = frozenset({Average, Sum, Adasum, Min, Max, Product})


def choose_op(op: int | None, average: bool | None) -> int:
    """Return the reduction that `op` or the deprecated `average` asks for; neither means Average.

    Raises `ValueError` when both are given or when `op` is not a reduction that exists here.
    """
    if average is None and op in _AVAILABLE:
        return op
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    raise ValueError(f"op must be one of Average, Sum, Adasum, Min, Max, Product, got {op!r}")
