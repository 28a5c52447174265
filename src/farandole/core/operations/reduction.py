"""Reductions: operators, as Horovod's integers, with the factors before and after them.

Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020) adds the orthogonal parts of the
ranks' tensors and averages the parallel parts. It takes floating-point tensors and any number of ranks.
"""

import warnings
from typing import Final, NamedTuple

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5
# The engine's operators for float32 tensors that it sends as int8. `Compression.int8` chooses them; callers cannot.
AverageByInt8: Final = 6
SumByInt8: Final = 7
LINEAR: Final = frozenset({Average, Sum, AverageByInt8, SumByInt8})  # the gradient is reduced as the tensor was


# A NamedTuple, because the engine reads the fields by place (native/bind/request.cc).
class Reduction(NamedTuple):
    """How the ranks' tensors are combined: an operator, and the factors before and after it."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0


_UNSCALED: Final = {op: Reduction(op) for op in (Average, Sum, Adasum, Min, Max, Product)}


def choose_reduction(
    op: int | None, average: bool | None = None, prescale: float = 1.0, postscale: float = 1.0
) -> Reduction:
    """Return the reduction for `op` or the deprecated `average`, and the factors; Average by default.

    Raises `ValueError` if both are given, or if `op` is not an operator.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        op = Average if average else Sum
    found = _UNSCALED.get(Average if op is None else op)
    if found is None:
        raise ValueError(f"op must be one of Average, Sum, Adasum, Min, Max, Product, got {op!r}")
    return found if prescale == 1.0 and postscale == 1.0 else Reduction(found.op, prescale, postscale)
