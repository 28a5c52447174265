"""Requests for tests that call an engine directly."""

from collections.abc import Sequence

from farandole.core.operations.reduction import Reduction, Sum
from farandole.core.operations.request import Request


def recurring(kind: int, op: int = Sum, root: int = 0, splits: Sequence[int] | None = None) -> Request:
    """Return a request that the engine may cache under a number, as for a named operation."""
    return Request(kind, "recurring", Reduction(op), root, splits)
