"""Requests as JAX keeps them with a traced program, and compares them."""

from dataclasses import dataclass, replace
from typing import Any

from farandole.core.operations.request import Request
from farandole.core.plugins import Address

__all__ = ["TracedRequest"]


@dataclass(frozen=True)
class TracedRequest:
    """One request over one array or a group of them.

    `at` names the rank that it belongs to: ranks that are threads of one process do not share traced programs."""

    request: Request
    at: Address
    shapes: tuple[tuple[int, ...], ...]  # of the arrays
    rows: tuple[int, ...] | None = None  # of an allgather's results; None: all ranks have as many

    def backward(
        self,
        part: str = "",
        shapes: tuple[tuple[int, ...], ...] | None = None,
        rows: tuple[int, ...] | None = None,
        **changes: Any,
    ) -> "TracedRequest":
        """Return the request for a part of the gradient, under a name of its own."""
        return replace(
            self, request=self.request.backward(part, **changes), shapes=shapes or self.shapes, rows=rows or self.rows
        )
